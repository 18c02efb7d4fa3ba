"""All models: which are loaded, who waits for which, who must go when memory is needed."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

from kvclient import wire
from kvclient.errors import Busy, Cancelled, Internal, KvdError, OutOfMemory
from kvclient.wire import Message
from kvd.config import Config
from kvd.front.crashes import Crashes, Policy
from kvd.front.loader import Loader, Means
from kvd.front.logs import logger
from kvd.front.memory import Ledger
from kvd.front.metrics import Count, Metrics
from kvd.front.registry import Model
from kvd.front.room import Room
from kvd.front.sessions import Session, Sessions, Stage, cancelled
from kvd.front.slot import Slot, State
from kvd.front.workers import Loss, Worker
from kvd.messages import Cancel, Event, Granted, Grow, Work

WAITING_MOST = 256 * 1024 * 1024
"""bytes of requests that no worker has begun with"""


class StoreDoor(Protocol):
    def ask(self, worker: Worker, message: Message) -> None: ...
    def forget(self, run: int) -> None: ...


class Fleet:
    """Owned by the loop's thread. The Owner of every worker."""

    def __init__(
        self, means: Means, config: Config, ledger: Ledger, sessions: Sessions, store: StoreDoor, metrics: Metrics
    ) -> None:
        self.config = config
        self.ledger = ledger
        self._sessions, self._store, self._metrics = sessions, store, metrics
        self._slots: dict[str, Slot] = {}
        self._by_worker: dict[Worker, Slot] = {}
        self.room = Room(ledger, lambda: self.slots, self.unload)
        self._loader = Loader(means, self)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    @property
    def slots(self) -> list[Slot]:
        return list(self._slots.values())

    def slot(self, model: Model) -> Slot:
        """The slot of this model, with its folder as it is now."""
        slot = self._slots.get(model.name)
        if slot is None:
            slot = self._slots[model.name] = Slot(model, Crashes(Policy.of(self.config.daemon)))
        slot.model = model
        return slot

    def check_room(self) -> None:
        """Raises Busy where no more requests are taken, of whatever model."""
        if self._closing:
            raise Busy("kvd is stopping", waiting=0, limit=0)
        held = sum(len(session.packed) for session in self._sessions)
        if held > WAITING_MOST:
            raise Busy(f"waiting requests hold {held} bytes", waiting=held, limit=WAITING_MOST)

    def submit(self, session: Session, model: Model) -> None:
        """Send a request to its worker, now or when the model is loaded. Raises Busy, or WorkerLost for a model that is
        down."""
        slot = self.slot(model)
        limit = self.config.daemon.max_waiting
        self.check_room()
        if slot.not_begun >= limit:
            raise Busy(f"{slot.not_begun} requests wait for {model.name}", waiting=slot.not_begun, limit=limit)
        slot.use()
        session.model = model.name
        session.on_cancel = lambda reason: self._cancel(slot, session, reason)
        if slot.state is State.LOADED and not slot.waiting:
            self._send(slot, session)
            return
        session.repeat = ("queued", {"position": len(slot.waiting)})
        slot.waiting.append(session)
        self._sessions.tell(session, *session.repeat)
        self._start(slot)

    async def load(self, model: Model, kv: str | None, pin: bool | None, ttl_s: float | None) -> dict[str, Any]:
        """Load, or change how a loaded model is kept; another KV precision replaces it. Also lifts a crash stop.

        Raises Busy for another precision while it has requests: a model has one precision at a time."""
        if self._closing:
            raise Busy("kvd is stopping", waiting=0, limit=0)
        slot = self.slot(model)
        slot.check_precision(kv)
        before = slot.kv
        slot.crashes.clear()
        if pin is not None:
            slot.pinned = pin
        if ttl_s is not None:
            slot.ttl_s = ttl_s
        wanted = slot.kv = kv or slot.kv
        if wanted is not None and not slot.has_precision(wanted):
            await self.unload(slot, "precision")
            slot.kv = wanted  # an unload by hand may have come meanwhile
        slot.use()
        while slot.state is not State.LOADED:
            task = self._start(slot)
            await asyncio.wait({task})
            if task.cancelled():
                raise _not_loaded(slot)
            if task.exception() is not None and slot.kv == wanted:  # else an unload by hand has forgotten it
                slot.kv = before  # the next request does not try what cannot be loaded
            task.result()
        return slot.describe()

    async def unload(self, slot: Slot, reason: str, drain_s: float = 0.0) -> None:
        """End the model's process; requests at it end with an error unless they finish within `drain_s`."""
        worker = slot.worker
        if worker is None and slot.loading is not None:
            slot.loading.cancel()  # it has no process yet
        elif worker is not None and slot.state is not State.STOPPING:
            self._metrics.add(Count.MODELS, reason)
            logger.info("unload", model=slot.model.name, reason=reason)
            if slot.state is State.LOADED:
                worker.stop(drain_s)
            else:
                worker.kill()
            slot.state = State.STOPPING
        await slot.gone.wait()

    async def close(self, drain_s: float) -> None:
        """Take no more requests, let running ones finish within `drain_s`, end every process."""
        self._closing = True
        for slot in self.slots:
            for session in list(slot.waiting):
                self.fail_waiting(slot, session, Cancelled("kvd is stopping"))
        await asyncio.gather(*(self.unload(slot, "shutdown", drain_s) for slot in self.slots))

    def set_config(self, config: Config) -> None:
        """What changed live; loaded models keep how they were loaded."""
        self.config = config
        for slot in self.slots:
            slot.crashes.policy = Policy.of(self.config.daemon)

    def kill(self) -> None:
        for worker in self._by_worker:
            worker.kill()

    def unload_later(self, slot: Slot, reason: str) -> None:
        task = asyncio.get_running_loop().create_task(self.unload(slot, reason))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def fail_waiting(self, slot: Slot, session: Session, problem: KvdError) -> None:
        """End a request that is not at a worker."""
        if session in slot.waiting:
            slot.waiting.remove(session)
        self._sessions.fail(session, problem)

    def patience(self, slot: Slot) -> float:
        """Seconds without progress that this model's process may take for the work in hand, if the watchdog's own limit
        is not longer."""
        told = 10 * slot.worker.beat.expected_s if slot.worker is not None else 0.0
        loading = slot.worker is None or slot.state is State.LOADING
        return max(told, self._loader.patience(slot)) if loading else told

    # what workers report

    def ready(self, worker: Worker, info: dict[str, Any]) -> None:
        slot = self._by_worker[worker]
        slot.state = State.LOADED
        slot.load_s = round(time.monotonic() - worker.born, 3)
        self.ledger.correct(slot.model.name, info.get("weights_bytes"), info.get("pool_bytes"))
        self._metrics.add(Count.WORKERS, "ready")
        kv = {name: info.get(name) for name in ("kv_precision", "kv_bytes_per_token", "kv_layers")}
        logger.info("loaded", model=slot.model.name, pid=worker.pid, seconds=slot.load_s, **kv)
        self._loader.arrived(worker, None)
        now = time.monotonic()
        while slot.waiting and slot.state is State.LOADED:
            session = slot.waiting.popleft()
            session.load_s = round(now - session.born, 3)
            self._send(slot, session)
        slot.use()

    def failed(self, worker: Worker, problem: KvdError) -> None:
        logger.warning("load failed", model=worker.spec.name, code=problem.code, reason=problem.message)
        worker.kill()
        self._loader.arrived(worker, problem)

    def event(self, header: bytes, event: Event) -> None:
        session = self._sessions.get(event.id)
        if session is None or session.stage is Stage.WAITING:
            return  # ended here already (its client is gone), or not a worker's to speak of
        if event.kind != "queued":
            session.stage, session.packed = Stage.RUNNING, b""
        if event.kind not in wire.TERMINAL:
            self._sessions.forward(session, header, event)
            return
        self._end(session, event.kind, wire.unpack(event.packed))

    def asks_store(self, worker: Worker, message: Message) -> None:
        self._store.ask(worker, message)

    def grow(self, worker: Worker, asked: Grow) -> None:
        granted = self.ledger.grow(worker.spec.name, asked.nbytes)
        coming = not granted and asked.needed and self.room.is_coming(self._by_worker[worker], asked.nbytes)
        if not granted and not coming:
            self._metrics.add(Count.MEMORY, "grow")
        if asked.nbytes > 0:
            worker.send(Granted(asked.q, granted, self.ledger.free, coming))

    def lost(self, worker: Worker, loss: Loss) -> None:
        slot = self._by_worker.pop(worker)
        slot.worker, slot.state = None, State.NOT_LOADED
        self.ledger.release(slot.model.name)
        self._store.forget(worker.spec.run)
        self._metrics.add(Count.WORKERS, loss.reason)
        problem: KvdError = Cancelled(f"model {slot.model.name} was unloaded", model=slot.model.name)
        if loss.reason != "stopped":
            slot.crashes.add(time.monotonic())
            problem = loss.error(slot.model.name)
            name = slot.model.name
            logger.error("worker lost", model=name, reason=loss.reason, status=loss.status, log=slot.last_log)
        self._loader.arrived(worker, problem)
        for session in list(slot.live.values()):
            slot.live.pop(session.id)
            harmless = session.stage is Stage.SENT and not session.sent_again and not session.cancelled
            if harmless and loss.reason != "stopped":
                self._wait_again(slot, session)
            else:
                self._sessions.fail(session, problem)
        slot.gone.set()
        if slot.waiting and not self._closing:
            self._start(slot)

    def started(self, slot: Slot, worker: Worker) -> None:
        """The loader has a process for this slot."""
        slot.worker, slot.state = worker, State.LOADING
        slot.gone.clear()
        slot.last_log = str(worker.log)
        self._by_worker[worker] = slot
        self._metrics.add(Count.WORKERS, "started")

    # inside

    def _start(self, slot: Slot) -> asyncio.Task[None]:
        """The one task that loads this model; its failure ends every request that waits for it."""
        if slot.loading is None or slot.loading.done():
            slot.loading = asyncio.get_running_loop().create_task(self._loader.load(slot))
            slot.loading.add_done_callback(lambda task: self._load_ended(slot, task))
        return slot.loading

    def _load_ended(self, slot: Slot, task: asyncio.Task[None]) -> None:
        problem = _not_loaded(slot) if task.cancelled() else task.exception()
        if problem is None:
            return
        if not isinstance(problem, KvdError):
            logger.error("load failed", model=slot.model.name, exc_info=problem)
            problem = Internal(f"loading {slot.model.name} failed: {type(problem).__name__}: {problem}")
        if isinstance(problem, OutOfMemory):
            self._metrics.add(Count.MEMORY, "load")
        for session in list(slot.waiting):
            self.fail_waiting(slot, session, problem)

    def _send(self, slot: Slot, session: Session) -> None:
        assert slot.worker is not None
        session.stage = Stage.SENT
        slot.live[session.id] = session
        slot.worker.send(Work(session.kind, session.id, session.packed))

    def _wait_again(self, slot: Slot, session: Session) -> None:
        """A request that the lost worker had not begun goes to the next one; once, in case it is what kills workers."""
        session.stage, session.sent_again = Stage.WAITING, True
        slot.waiting.append(session)
        self._sessions.tell(session, "queued", {"position": len(slot.waiting) - 1})

    def _end(self, session: Session, kind: str, body: dict[str, Any]) -> None:
        slot = self._slots[session.model]
        slot.live.pop(session.id, None)
        slot.use()
        stats = body.get("stats")
        if kind == "done" and isinstance(stats, dict):
            body["model"], stats["load_s"] = session.model, session.load_s
            self._metrics.add_stats(stats)
        self._sessions.finish(session, kind, body, str(body.get("code", "error")) if kind == "error" else "done")

    def _cancel(self, slot: Slot, session: Session, reason: str) -> None:
        if session.stage is Stage.WAITING:
            self.fail_waiting(slot, session, cancelled(reason))
        elif slot.worker is not None:
            slot.worker.send(Cancel(session.id, reason))


def _not_loaded(slot: Slot) -> Cancelled:
    return Cancelled(f"loading {slot.model.name} was cancelled", model=slot.model.name)
