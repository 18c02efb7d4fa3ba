"""A gateway on a port of its own over a fake daemon."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import uvicorn

from kvclient.aio import AsyncClient
from kvclient.gateway.app import build
from kvclient.gateway.settings import Settings
from rig.daemon import Daemon, demo_models, short_home
from tests.gateway.fake import FakeDaemon, Script, default_script


@contextmanager
def serving(path: Any, settings: Settings | None = None) -> Iterator[str]:
    """A gateway for the daemon at `path`, in a thread. Gives its address."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    app = build(AsyncClient(path), settings or Settings())
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
        assert not thread.is_alive()


@dataclass(frozen=True, slots=True)
class Served:
    url: str
    daemon: FakeDaemon


@pytest.fixture(scope="session")
def real_daemon() -> Iterator[Daemon]:
    """The real daemon with the demo model, which has aliases: one for all tests of this folder."""
    with short_home(demo_models()) as home, Daemon(home, "--models-aliases", "claude-*=demo; gpt-4o=demo") as daemon:
        yield daemon


@pytest.fixture(scope="session")
def real_url(real_daemon: Daemon) -> Iterator[str]:
    with serving(real_daemon.socket) as url:
        yield url


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    with ExitStack() as stack:

        def start(script: Script = default_script, settings: Settings | None = None) -> Served:
            daemon = stack.enter_context(FakeDaemon(script))
            return Served(stack.enter_context(serving(daemon.socket, settings)), daemon)

        yield start
