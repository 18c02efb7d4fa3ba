from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvclient import core
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
