"""Both clients against a fake daemon: the same promises for each."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvclient import BadRequest, Busy, Client, KvdError, ProtocolError, Stats, Timeout, Unreachable, link, wire
from kvclient.hub import probe
from tests.client.faces import FACES
from tests.client.fake import FakeDaemon, answer, result, silent

SOON_S = 30.0
"""Upper limit for what must not hang; nothing here takes a tenth of it."""


def test_generate_gives_the_whole_answer(kv: Any) -> None:
    done = kv.generate("demo", "hi", max_tokens=2, temperature=0.0)
    assert (done.text, done.finish_reason, done.stats.cached_tokens) == ("Hello world", "stop", 6)


def test_a_stream_gives_each_event_and_ends_with_done(kv: Any) -> None:
    events = list(kv.stream("demo", messages=[{"role": "user", "content": "hi"}]))
    assert [event.kind for event in events] == ["queued", "progress", "text", "text", "finish", "done"]
    assert "".join(event.text for event in events) == events[-1].done.text == "Hello world"
    assert {event.id for event in events} == {events[-1].done.id}


def test_what_is_asked_arrives(daemon: FakeDaemon, kv: Any) -> None:
    kv.generate("demo", tokens=[1, 2], stop="x", seed=5, request_id="mine")
    message = daemon.next("generate")
    assert (message.model, message.id) == ("demo", "mine")
    assert message.body == {"tokens": [1, 2], "stop": ["x"], "seed": 5}


def test_no_model_means_the_daemons_default(daemon: FakeDaemon, kv: Any) -> None:
    kv.generate(None, "hi")
    assert daemon.next("generate").model == ""


@pytest.mark.parametrize(("call", "verb", "body", "given", "expected"), [
    (lambda kv: kv.models(), "models", {}, {"models": [{"name": "demo"}]}, [{"name": "demo"}]),
    (lambda kv: kv.models("x"), "models", {"model": "x"}, {"models": [{"name": "demo"}]}, [{"name": "demo"}]),
    (lambda kv: kv.status(), "status", {}, {"up": 1}, {"up": 1}),
    (lambda kv: kv.load("m", kv="k8v4", ttl_s=5), "load", {"model": "m", "kv": "k8v4", "ttl_s": 5.0}, {}, {}),
    (lambda kv: kv.unload("m"), "unload", {"model": "m"}, {}, {}),
    (lambda kv: kv.warm("m", "x", pin=True), "warm", {"prompt": "x", "pin": True},
     {"choices": [], "stats": {"stored_tokens": 3}}, Stats(stored_tokens=3)),
    (lambda kv: kv.explain("m", "x"), "explain", {"prompt": "x"}, {"prompt_tokens": 3}, {"prompt_tokens": 3}),
    (lambda kv: kv.count("m", tokens=[1]), "count", {"tokens": [1]}, {"tokens": 1}, 1),
    (lambda kv: kv.cancel("abc"), "cancel", {"id": "abc"}, {"cancelled": False}, False),
    (lambda kv: kv.cache("ls", model="m"), "cache", {"verb": "ls", "model": "m"}, {"rows": []}, {"rows": []}),
    (lambda kv: kv.reload(), "reload", {}, {"changed": []}, {"changed": []}),
    (lambda kv: kv.shutdown(2.5), "shutdown", {"drain_s": 2.5}, {}, {}),
])  # fmt: skip
def test_each_verb_sends_its_fields_and_reads_its_result(
    daemon: FakeDaemon, kv: Any, call: Any, verb: str, body: dict[str, Any], given: dict[str, Any], expected: Any
) -> None:
    daemon.scripts[verb] = result(**given)
    assert call(kv) == expected
    message = daemon.next(verb)
    assert message.body == body
    assert (message.id in daemon.controlled) == (verb in ("status", "cancel", "shutdown"))


def test_ping_tells_the_seconds_it_took(kv: Any) -> None:
    assert 0 < kv.ping() < SOON_S


def test_a_malformed_result_is_a_protocol_error(daemon: FakeDaemon, kv: Any) -> None:
    daemon.scripts["models"] = result(wrong=1)
    with pytest.raises(ProtocolError, match="malformed result of models"):
        kv.models()


def test_long_verbs_tell_their_progress(daemon: FakeDaemon, kv: Any) -> None:
    def warm(message: wire.Message, send: Any) -> None:
        send("progress", {"done": 1, "total": 2})
        send("done", {"choices": [], "stats": {}})

    daemon.scripts["warm"] = warm
    seen: list[Any] = []
    kv.warm("demo", "text", on_event=seen.append)
    assert [event.progress.done for event in seen] == [1]


def test_a_callback_that_raises_cancels_the_request(daemon: FakeDaemon, kv: Any) -> None:
    daemon.scripts["warm"] = lambda message, send: send("progress", {"done": 1, "total": 2})

    def refuse(event: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        kv.warm("demo", "text", on_event=refuse)
    id = daemon.next("warm").id
    assert daemon.next("cancel").body == {"id": id}


def test_a_bad_request_is_refused_before_anything_is_sent(daemon: FakeDaemon, kv: Any) -> None:
    for call in (kv.generate, kv.stream):
        with pytest.raises(BadRequest, match="temperature"):
            call("demo", "hi", temperature=-1)
    assert daemon.received.empty()


@pytest.mark.parametrize("kind", [k for k in KvdError.__subclasses__() if k.__module__ == "kvclient.errors"])
def test_the_daemons_errors_arrive_as_their_types(daemon: FakeDaemon, kv: Any, kind: type[KvdError]) -> None:
    daemon.scripts["generate"] = lambda message, send: send("error", kind("it tripped", limit=5).to_wire())
    with pytest.raises(kind, match="it tripped") as raised:
        kv.generate("demo", "hi")
    assert type(raised.value) is kind and raised.value.details == {"limit": 5}


def test_events_before_an_error_are_delivered_first(daemon: FakeDaemon, kv: Any) -> None:
    def fail(message: wire.Message, send: Any) -> None:
        send("text", {"text": "half", "index": 0})
        send("error", Busy("full").to_wire())

    daemon.scripts["generate"] = fail
    stream = kv.stream("demo", "hi")
    assert next(stream).text == "half"
    with pytest.raises(Busy):
        next(stream)
    assert list(stream) == []


def test_without_a_daemon_the_error_names_the_socket_and_the_remedy(tmp_path: Path) -> None:
    for face in FACES.values():
        client = face(Path("/tmp/kvd-nobody/kvd.sock"))
        for call in (client.status, client.models, lambda c=client: c.generate("demo", "hi")):
            with pytest.raises(Unreachable, match=r"no daemon at /tmp/kvd-nobody/kvd.sock; start it with `kvd start`"):
                call()
        client.close()


def test_a_stale_socket_is_no_daemon(daemon: FakeDaemon, kv: Any) -> None:
    daemon.die()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(daemon.path))
    with pytest.raises(Unreachable, match="kvd start"):
        kv.generate("demo", "hi")


def test_a_daemon_out_of_connections_is_busy_and_not_absent(daemon: FakeDaemon, kv: Any) -> None:
    daemon.path.rename(daemon.path.with_name("kvd.sock.full"))
    with pytest.raises(Busy, match="no connection left"):
        kv.generate("demo", "hi")


def test_a_full_backlog_is_busy_at_once() -> None:
    path = Path("/tmp") / f"kvd-backlog-{threading.get_native_id()}"
    with socket.socket(socket.AF_UNIX) as listening:
        try:
            listening.bind(str(path))
            listening.listen(0)
            held = []
            with pytest.raises(Busy, match="queue is full"):
                for _ in range(50):
                    probe(path)
                    waiting = socket.socket(socket.AF_UNIX)
                    held.append(waiting)
                    waiting.setblocking(False)
                    waiting.connect_ex(str(path))
        finally:
            path.unlink()
            for one in held:
                one.close()


def test_a_backlog_that_fills_up_right_after_the_first_look_is_busy_too(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("/tmp") / f"kvd-filled-{threading.get_native_id()}"
    looks: list[Path] = []

    def look(target: Path, name: Path | None = None) -> None:
        looks.append(target)
        if len(looks) > 1:
            probe(target, name)

    monkeypatch.setattr(link, "probe", look)
    held = [socket.socket(socket.AF_UNIX) for _ in range(50)]
    with socket.socket(socket.AF_UNIX) as listening, Client(path) as kv:
        try:
            listening.bind(str(path))
            listening.listen(0)
            for waiting in held:
                waiting.setblocking(False)
                waiting.connect_ex(str(path))
            with pytest.raises(Busy, match="queue is full"):
                kv.generate("demo", "hi")
        finally:
            path.unlink()
            for one in held:
                one.close()


def test_a_dying_daemon_ends_the_request_at_once_and_nothing_that_came_is_lost(daemon: FakeDaemon, kv: Any) -> None:
    def flood(message: wire.Message, send: Any) -> None:
        for _ in range(900):
            send("text", {"text": "x", "index": 0})

    daemon.scripts["generate"] = flood
    stream = kv.stream("demo", "hi")
    assert next(stream).text == "x"
    daemon.die()
    began, got = time.monotonic(), 1
    with pytest.raises(Unreachable, match="went away before the request was done"):
        for event in stream:
            got += len(event.text)
    assert got == 900 and time.monotonic() - began < SOON_S


@pytest.mark.usefixtures("impatient")
def test_a_daemon_that_answers_nothing_is_given_up(daemon: FakeDaemon, kv: Any) -> None:
    daemon.scripts.update(generate=silent, ping=silent)
    with pytest.raises(Unreachable, match="has not answered for"):
        kv.generate("demo", "hi")


@pytest.mark.usefixtures("impatient")
def test_a_stopped_daemon_is_given_up(daemon: FakeDaemon, kv: Any) -> None:
    """As after SIGSTOP: the system still accepts connections, nobody shakes hands."""
    daemon.die()
    frozen = []
    for name in ("kvd.sock", "kvd.sock.ctl"):
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(daemon.path.with_name(name)))
        listening.listen(8)
        frozen.append(listening)
    for call in (lambda: kv.generate("demo", "hi"), kv.status):
        with pytest.raises(Unreachable, match="has not answered for"):
            call()
    for listening in frozen:
        listening.close()


@pytest.mark.usefixtures("impatient")
def test_a_slow_verb_may_be_silent_while_pings_are_answered(daemon: FakeDaemon, kv: Any) -> None:
    pinged = threading.Semaphore(0)

    def ping(message: wire.Message, send: Any) -> None:
        send("result", {})
        pinged.release()

    def load(message: wire.Message, send: Any) -> None:
        def later() -> None:
            assert all(pinged.acquire(timeout=10) for _ in range(3))
            daemon.tell(message.id, "result", {"ready": True})

        threading.Thread(target=later).start()

    daemon.scripts.update(load=load, ping=ping)
    assert kv.load("demo") == {"ready": True}


@pytest.mark.usefixtures("impatient")
def test_timeout_is_sent_and_kept_by_the_client_too(daemon: FakeDaemon, kv: Any) -> None:
    daemon.scripts["generate"] = silent
    with pytest.raises(Timeout, match=r"no answer within 0\.1 s"):
        kv.generate("demo", "hi", timeout=0.1)
    asked = daemon.next("generate")
    assert asked.body["timeout"] == 0.1
    assert daemon.next("cancel").body == {"id": asked.id}


def test_another_version_of_the_daemon_is_a_clear_error(daemon: FakeDaemon, kv: Any) -> None:
    daemon.scripts["status"] = lambda message, send: send("result", {}, version=wire.VERSION + 1)
    with pytest.raises(ProtocolError, match="install one version of both"):
        kv.status()


def test_a_reply_for_somebody_else_is_a_protocol_error(daemon: FakeDaemon, kv: Any) -> None:
    daemon.scripts["status"] = lambda message, send: send("result", {}, id="other")
    with pytest.raises(ProtocolError, match="request other"):
        kv.status()


def started(daemon: FakeDaemon, kv: Any) -> Any:
    """A stream whose first event has come and whose next one never will."""
    daemon.scripts["generate"] = lambda message, send: send("queued", {"position": 0})
    stream = kv.stream("demo", "hi")
    assert next(stream).kind == "queued"
    return stream


def test_closing_a_stream_cancels_it(daemon: FakeDaemon, kv: Any) -> None:
    stream = started(daemon, kv)
    stream.close()
    cancel = daemon.next("cancel")
    assert cancel.body == {"id": stream.id} and cancel.id in daemon.controlled
    assert list(stream) == []


def test_dropping_a_stream_cancels_it(daemon: FakeDaemon, kv: Any) -> None:
    id = started(daemon, kv).id
    assert daemon.next("cancel").body == {"id": id}


def test_breaking_out_of_a_loop_cancels_the_request(daemon: FakeDaemon, kv: Any) -> None:
    daemon.scripts["generate"] = lambda message, send: send("queued", {"position": 0})
    for event in kv.stream("demo", "hi"):
        id = event.id
        break
    assert daemon.next("cancel").body == {"id": id}


def test_closing_the_client_cancels_its_streams(daemon: FakeDaemon) -> None:
    for face in FACES.values():
        client = face(daemon.path)
        stream = started(daemon, client)
        client.close()
        assert daemon.next("cancel").body == {"id": stream.id}


def test_a_finished_request_is_not_cancelled(daemon: FakeDaemon, kv: Any) -> None:
    list(kv.stream("demo", "hi"))
    kv.ping()
    kinds = [daemon.received.get(timeout=10).kind for _ in range(2)]
    assert kinds == ["generate", "ping"] and daemon.received.empty()


def test_shutdown_may_end_with_the_connection(daemon: FakeDaemon, kv: Any) -> None:
    daemon.scripts["shutdown"] = lambda message, send: daemon._stop.set()
    assert kv.shutdown() == {}


def test_a_daemon_that_comes_back_is_found_by_the_next_call(daemon: FakeDaemon, kv: Any) -> None:
    daemon.die()
    with pytest.raises(Unreachable):
        kv.status()
    daemon._stop.clear()
    daemon._up.clear()
    daemon._thread = threading.Thread(target=daemon._run, daemon=True)
    daemon._thread.start()
    assert daemon._up.wait(10)
    assert kv.status() == {"up": True}


def test_threads_share_a_client(daemon: FakeDaemon) -> None:
    daemon.scripts["generate"] = lambda message, send: answer(message, send)
    texts: list[str] = []
    with Client(daemon.path) as kv:
        def ask() -> None:
            for _ in range(20):
                texts.append(kv.generate("demo", "hi").text)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON_S)
    assert texts == ["Hello world"] * 160


def test_many_short_requests_from_many_threads_never_collide(daemon: FakeDaemon) -> None:
    failures: list[KvdError] = []
    with Client(daemon.path) as kv:
        def ping() -> None:
            try:
                for _ in range(300):
                    kv.ping()
            except KvdError as problem:
                failures.append(problem)

        threads = [threading.Thread(target=ping) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON_S)
    assert failures == []


def test_closing_a_client_wakes_the_threads_that_wait(daemon: FakeDaemon) -> None:
    from kvclient import Cancelled

    daemon.scripts["generate"] = silent
    raised: list[BaseException] = []
    kv = Client(daemon.path)

    def ask() -> None:
        try:
            kv.generate("demo", "hi")
        except KvdError as problem:
            raised.append(problem)

    thread = threading.Thread(target=ask)
    thread.start()
    daemon.next("generate")
    kv.close()
    thread.join(SOON_S)
    assert [type(one) for one in raised] == [Cancelled]
    with pytest.raises(Cancelled):
        kv.status()


OUT_OF_DESCRIPTORS = """
import resource, sys, time
from kvclient import Client, KvdError
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
with Client(sys.argv[1]) as kv:
    streams = []
    for _ in range(100):
        try:
            streams.append(kv.stream("demo", "hi"))
        except KvdError as problem:
            print(type(problem).__name__, problem.message)
            break
    while streams:
        streams.pop().close()
    for _ in range(1000):  # ZeroMQ gives descriptors back a moment later
        try:
            print(kv.status())
            break
        except KvdError:
            time.sleep(0.01)
"""


def test_a_process_out_of_descriptors_gets_an_error_and_recovers(daemon: FakeDaemon) -> None:
    daemon.scripts["generate"] = silent
    done = subprocess.run([sys.executable, "-c", OUT_OF_DESCRIPTORS, str(daemon.path)], capture_output=True, text=True,
                          timeout=SOON_S)  # fmt: skip
    assert done.stderr == ""
    error, status = done.stdout.splitlines()
    assert error.startswith("Busy no further connection can be opened") and status == "{'up': True}"


def test_hundreds_of_streams_live_side_by_side(daemon: FakeDaemon) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 6000
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"this system allows {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    try:
        with Client(daemon.path) as kv:
            streams = [started(daemon, kv) for _ in range(400)]
            assert len({stream.id for stream in streams}) == 400
            assert kv.status() == {"up": True}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_nothing_stays_open(daemon: FakeDaemon, kv: Any) -> None:
    def ask() -> None:
        daemon.scripts["generate"] = answer
        kv.generate("demo", "hi")
        id = started(daemon, kv).id
        assert daemon.next("cancel").body == {"id": id}

    ask()
    deadline, before = time.monotonic() + SOON_S, len(os.listdir("/dev/fd"))
    for _ in range(20):
        ask()
    while len(os.listdir("/dev/fd")) > before + 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir("/dev/fd")) <= before + 4
