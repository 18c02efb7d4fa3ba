"""Both clients against a fake daemon: the same promises for each."""

from __future__ import annotations

from typing import Any

import pytest

from kvclient import BadRequest, Busy, KvdError, ProtocolError, Stats, wire
from tests.client.faces import FACES
from tests.client.fake import FakeDaemon, result, started

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
