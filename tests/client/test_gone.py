"""A daemon that is not there, has no room, dies or falls silent, seen by both clients."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvclient import Busy, Client, ProtocolError, Timeout, Unreachable, link, wire
from kvclient.hub import probe
from tests.client.faces import FACES
from tests.client.fake import FakeDaemon, silent

SOON_S = 30.0
"""Upper limit for what must not hang; nothing here takes a tenth of it."""


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
