"""From a model's folder to a worker that is ready: memory first, then the process, then its word that it has loaded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Protocol

import zmq

from kvclient.errors import Busy, KvdError, WorkerLost
from kvd.config import Config
from kvd.front.logs import logger
from kvd.front.memory import Ledger
from kvd.front.reads import in_thread
from kvd.front.registry import Model, Needs, find, needs
from kvd.front.room import Room
from kvd.front.slot import Slot
from kvd.front.spawn import WORKER, Spec
from kvd.front.workers import Owner, Worker
from kvd.home import Home
from kvd.models.backend import expected

SLOWEST_LOAD = 10_000_000
"""bytes of weights per second; a load that takes longer is taken for stuck"""
SOCKETS = 10_000
"""numbers in the names of workers' sockets"""


def no_preload(home: Path) -> Path | None:
    return None


@dataclass(frozen=True, slots=True)
class Means:
    """What starting a worker takes besides the model. `command` is its program; `preload` finds the library to put in
    front of it (it may take seconds: it runs in a thread)."""

    context: zmq.Context[zmq.Socket[bytes]]
    home: Home
    preload: Callable[[Path], Path | None] = no_preload
    command: Sequence[str] = WORKER
    backend: Callable[[], str] = expected


class Host(Owner, Protocol):
    """The fleet, as the loader knows it."""

    config: Config
    ledger: Ledger
    room: Room

    def started(self, slot: Slot, worker: Worker) -> None: ...


class Loader:
    """Owned by the loop's thread."""

    def __init__(self, means: Means, host: Host) -> None:
        self._means, self._host = means, host
        self._runs = count(1)
        self._arrivals: dict[Worker, asyncio.Future[None]] = {}

    async def load(self, slot: Slot) -> None:
        """Returns when the worker is ready. Raises what the load failed with: OutOfMemory with both numbers, WorkerLost
        when its process ended or the model is down after too many crashes, or the worker's own error."""
        await slot.gone.wait()
        await self._back_off(slot)
        block = self._host.config.cache.block_size
        slot.model, wanted = await in_thread(lambda: _found(self._means.home, slot.model.name, block))
        preload = await in_thread(lambda: self._means.preload(self._means.home.root))
        async with self._host.room.turn:
            spec = await self._spec(slot, wanted, preload)
        arrival: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            worker = Worker(self._means.context, self._means.home, spec, self._host)
        except OSError as problem:
            self._host.ledger.release(slot.model.name)
            raise Busy(f"no process for {slot.model.name}: {problem.strerror}", model=slot.model.name) from None
        self._arrivals[worker] = arrival
        self._host.started(slot, worker)
        logger.info("load", model=slot.model.name, pid=worker.pid, kv=spec.kv, weights_bytes=spec.weights_limit)
        await arrival

    def arrived(self, worker: Worker, problem: KvdError | None) -> None:
        """The worker is ready, or will never be. Only the first word counts."""
        arrival = self._arrivals.pop(worker, None)
        if arrival is None or arrival.done():
            return
        if problem is None:
            arrival.set_result(None)
        else:
            arrival.set_exception(problem)

    def patience(self, slot: Slot) -> float:
        """Seconds within which a model of this size must have loaded."""
        return self._host.ledger.held(slot.model.name).weights / SLOWEST_LOAD

    async def _back_off(self, slot: Slot) -> None:
        now, policy, name = time.monotonic(), slot.crashes.policy, slot.model.name
        if slot.crashes.down(now):
            raise WorkerLost(
                f"model {name} crashed {slot.crashes.count(now)} times within {policy.window:.0f} s and stays down; "
                f"`kvd load {name}` starts it again; the newest log is {slot.last_log}",
                model=name, reason="crash_loop", crashes=slot.crashes.count(now), log=slot.last_log,
            )  # fmt: skip
        if wait := slot.crashes.wait(now):
            logger.warning("back-off", model=name, seconds=round(wait, 2), crashes=slot.crashes.count(now))
            await asyncio.sleep(wait)

    async def _spec(self, slot: Slot, wanted: Needs, preload: Path | None) -> Spec:
        """Put the model on the ledger and say what to start. Raises OutOfMemory."""
        config, ledger, name = self._host.config, self._host.ledger, slot.model.name
        backend = self._means.backend()
        await self._host.room.make(slot, wanted.weights(backend, ledger.budget) + wanted.pool)
        available = ledger.free
        weights = wanted.weights(backend, available)
        largest = config.cache.pool if config.cache.pool is not None else available
        initial = max(wanted.pool, min(config.cache.pool_initial, available - weights, largest))
        ledger.reserve(name, weights, initial)
        most = ledger.budget - weights  # what of it is free at a time, the ledger says when the pool asks to grow
        run = next(self._runs)
        return Spec(
            run=run, name=name, model=slot.model.folder, kv=slot.kv or config.models.precision(name), preload=preload,
            command=self._means.command, store=config.store_path,
            socket=config.socket.with_name(f"{config.socket.name}.w{run % SOCKETS}"),
            block_size=config.cache.block_size, chunk=config.cache.chunk, weights_limit=weights, pool_initial=initial,
            pool_limit=most if config.cache.pool is None else max(initial, min(most, config.cache.pool)),
        )  # fmt: skip


def _found(home: Home, name: str, block_size: int) -> tuple[Model, Needs]:
    """The model as it is now. Raises what `find` and `needs` raise."""
    model = find(home.root, name)
    return model, needs(model.folder, block_size)
