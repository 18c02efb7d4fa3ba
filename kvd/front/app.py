"""`kvd serve`: the parts of the front put together, and run until it is told to stop."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from kvclient.errors import BadRequest, Cancelled, KvdError
from kvclient.wire import BEAT_S
from kvd import machine
from kvd.config import Config
from kvd.front import logs
from kvd.front.dispatch import Dispatch
from kvd.front.fleet import Fleet
from kvd.front.gate import raise_limit
from kvd.front.life import Stop, clear_tmp, wait_for_old_workers
from kvd.front.loader import Means
from kvd.front.logs import logger
from kvd.front.memory import Ledger
from kvd.front.metrics import Metrics
from kvd.front.registry import Registry
from kvd.front.reload import limits, reloaded
from kvd.front.server import Server
from kvd.front.sessions import Sessions
from kvd.front.spawn import WORKER
from kvd.front.storelike import StoreLike, open_store
from kvd.front.storethread import StoreThread
from kvd.front.verbs import Services
from kvd.front.watch import Watch
from kvd.front.workers import STOP_GRACE_S
from kvd.home import Home, Lock, check_owner

TICK_S = BEAT_S / 2
LINGER_MS = 500
"""for answers that are on their way when the daemon ends"""
STORE_CLOSE_S = 30.0
ENDING_S = STOP_GRACE_S + STORE_CLOSE_S + LINGER_MS / 1000 + 5.0
"""the most a daemon takes to end beyond the drain time: its workers, its store, its answers, and the process itself"""
LOST = 70
"""exit status of a daemon whose home was deleted"""


@dataclass(frozen=True, slots=True)
class Parts:
    """What tests replace: the worker's program, the library put in front of it, the store."""

    command: Sequence[str] = WORKER
    preload: Callable[[Path], Path | None] | None = None
    open_store: Callable[[Config], StoreLike] | None = None


def serve(config: Config, parts: Parts | None = None, ready: Callable[[int], None] = lambda budget: None) -> int:
    """Run the daemon until it is told to stop; returns the exit status. `ready(bytes for models)` is called when it
    answers. Raises BadRequest for a home that cannot be used or too few descriptors, and HomeLocked (with the pid)
    when another owns the home."""
    descriptors = raise_limit()
    home = Home(config.home)
    home.create()
    check_owner(config.socket.parent)
    with Lock(home) as lock, Lock(config.socket):
        logs.start(home.logs, config.daemon.log_level)
        try:
            return asyncio.run(_Front(config, home, lock, parts or Parts(), ready).run(descriptors))
        finally:
            logs.stop()


class _Front:
    def __init__(
        self, config: Config, home: Home, lock: Lock, parts: Parts, ready: Callable[[int], None]
    ) -> None:
        self._config, self._home, self._lock, self._parts, self._ready = config, home, lock, parts, ready

    async def run(self, descriptors: int) -> int:
        asyncio.get_running_loop().set_exception_handler(_unexpected)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        metrics = Metrics()
        sessions = Sessions(metrics)
        ledger = Ledger(machine.budget(self._config.memory.limit, machine.memory()))
        store = StoreThread(self._open_store)
        means = Means(context, self._home, self._parts.preload or _preload, self._parts.command)
        fleet = Fleet(means, self._config, ledger, sessions, store, metrics)
        stop = Stop(lambda: self._services.config.daemon.drain, fleet.kill)
        self._services = Services(
            self._config, Registry(self._home), fleet, ledger, sessions, store, metrics, stop.ask, self._reload,
            time.time(),
        )  # fmt: skip
        dispatch = Dispatch(self._services)
        server = Server(context, self._config.socket, descriptors, dispatch.message, sessions.gone, metrics)
        sessions.server = server
        stop.install(self._hang_up)
        ticker = asyncio.create_task(self._tick(Watch(fleet, sessions), stop))
        warming = asyncio.create_task(_warm(self._config))
        logger.info("ready", pid=os.getpid(), socket=str(self._config.socket), budget_bytes=ledger.budget)
        self._ready(ledger.budget)
        drain_s = await stop.wait()
        warming.cancel()
        await fleet.close(drain_s)
        await store.close(STORE_CLOSE_S)
        ticker.cancel()
        for session in sessions:
            sessions.fail(session, Cancelled("kvd is stopping"))
        if self._lock.lost:
            logs.stop()
            os._exit(LOST)  # closing a socket removes its name, which may be another daemon's by now
        server.close(LINGER_MS)
        await asyncio.to_thread(context.term)
        logger.info("stopped", pid=os.getpid())
        return 0

    def _open_store(self) -> StoreLike:
        """In the store's thread: the daemon answers meanwhile. Called again when the store could not be opened, or was
        lost."""
        if self._lock.lost:
            raise FileNotFoundError(f"{self._home.root} was deleted")
        old = wait_for_old_workers(self._home)
        if old:
            logger.info("took over", old_workers=old)
        clear_tmp(self._home)
        return (self._parts.open_store or open_store)(self._config)

    async def _tick(self, watch: Watch, stop: Stop) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            watch.tick(time.monotonic())
            if self._lock.lost and not stop.wanted:
                logger.error("stopping: the home was deleted", home=str(self._home.root))
                stop.ask(0.0)

    def _reload(self) -> tuple[list[str], list[str]]:
        """Read the file again; flags keep their values. Raises BadRequest, and then nothing changes."""
        new, applied, restart = reloaded(self._services.config)
        self._config = self._services.config = new
        self._services.fleet.set_config(new)
        self._services.store.set_limits(limits(new))
        logs.set_level(new.daemon.log_level)
        logger.info("reload", applied=applied, restart=restart)
        return applied, restart

    def _hang_up(self) -> None:
        """SIGHUP: a file that does not fit is logged, and changes nothing."""
        try:
            self._reload()
        except BadRequest as problem:
            logger.error("reload refused", problem=problem.message)


def _unexpected(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A bug in a callback: the loop goes on, the log has it."""
    logger.error("unexpected", what=context.get("message"), exc_info=context.get("exception"))


async def _warm(config: Config) -> None:
    if config.warm.prompts:
        from kvd.front.warmup import warm_up

        await warm_up(config.socket, config.warm.prompts)


def _preload(home: Path) -> Path | None:
    """None, with a line in the log, when OpenBLAS cannot be had: serving is slower then, not wrong."""
    from kvd.models import blas

    try:
        return blas.prepare(home)
    except KvdError as problem:
        logger.warning("OpenBLAS unavailable", problem=problem.message)
        return None
