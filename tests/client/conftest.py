from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from kvclient import core, wire
from tests.client.command import KV
from tests.client.faces import FACES
from tests.client.fake import FakeDaemon


@pytest.fixture(autouse=True)
def no_surprises(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tester's own daemon, model and wishes stay out of it."""
    for name in ("KVD_HOME", "KVD_SOCKET", "KVD_AUTOSTART", "KV_MODEL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    fake = FakeDaemon()
    yield fake
    fake.close()


@pytest.fixture(params=FACES)
def kv(request: pytest.FixtureRequest, daemon: FakeDaemon) -> Iterator[Any]:
    face = FACES[request.param](daemon.path)
    yield face
    face.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence counts after tenths of a second."""
    monkeypatch.setattr(core, "SILENCE_S", 0.2)
    monkeypatch.setattr(core, "PONG_S", 0.2)
    monkeypatch.setattr(core, "GRACE_S", 0.1)


@pytest.fixture
def environment(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVD_SOCKET", str(daemon.path))


@pytest.fixture
def running(daemon: FakeDaemon) -> Iterator[Any]:
    """Starts `kv` against a request that says `events` and then nothing more."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(*words: str, events: tuple[tuple[str, dict[str, Any]], ...] = (), **more: Any) -> subprocess.Popen[bytes]:
        def script(message: wire.Message, send: Any) -> None:
            for kind, body in events:
                send(kind, body)

        daemon.scripts["generate"] = script
        given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
        process = subprocess.Popen([*KV, *words], **given)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """(our end, the program's end)"""
    ours, theirs = pty.openpty()
    yield ours, theirs
    for descriptor in (ours, theirs):
        os.close(descriptor)
