"""The real daemon on the real demo model. One daemon per module; tests that stop it take `own_daemon`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvclient import Client
from rig.daemon import Daemon, demo_models, short_home


@pytest.fixture(scope="session")
def models() -> Path:
    return demo_models()


@pytest.fixture(scope="module")
def daemon(models: Path) -> Iterator[Daemon]:
    with short_home(models) as home, Daemon(home) as running:
        yield running


@pytest.fixture
def own_daemon(models: Path) -> Iterator[Daemon]:
    with short_home(models) as home, Daemon(home) as running:
        yield running


@pytest.fixture
def kv(daemon: Daemon) -> Iterator[Client]:
    with daemon.client() as client:
        yield client
