"""What verbs that ask a daemon are tried with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.front.support import Daemon, daemon


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    with daemon(models=("demo", "other")) as made:
        monkeypatch.setenv("KVD_HOME", str(made.home))
        monkeypatch.delenv("KVD_SOCKET", raising=False)
        monkeypatch.delenv("KVD_AUTOSTART", raising=False)
        yield made
