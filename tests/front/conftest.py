from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.front.support import Client, Daemon, daemon


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    """One daemon for a module's tests, with its model `demo`."""
    with daemon("daemon.respawn_delay=0.2", "daemon.max_waiting=4") as made:
        yield made


@pytest.fixture
def client(shared: Daemon) -> Iterator[Client]:
    with shared.client() as made:
        yield made
