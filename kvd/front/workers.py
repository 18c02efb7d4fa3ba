"""One worker process from exec to its last breath: the socket to it, its beats, its end."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import zmq

from kvclient import wire
from kvclient.errors import KvdError, ProtocolError, Timeout, WorkerLost
from kvclient.wire import Message
from kvd.front.lane import Frames, Lane, Sent
from kvd.front.logs import logger
from kvd.front.spawn import Spawned, Spec, spawn
from kvd.home import Home
from kvd.messages import (
    EVENT_KINDS,
    Beat,
    Clear,
    Cleared,
    Event,
    Failed,
    Grow,
    Ready,
    Stop,
    ToFront,
    ToWorker,
    to_front,
)

STORE_KINDS = frozenset({"lookup", "reserve", "written", "abandon", "bad_shard", "touched", "pin_path"})
LAST_WORDS_S = 0.05
"""between a worker's exit and its burial: what it sent before may still be on its way"""
STOP_GRACE_S = 10.0
"""beyond the drain time: flushing, giving memory back"""
KEPT_LOGS = 20
CLEAR_S = 30.0
"""for the answer to a clear, which waits for the step in hand"""
CLEARS = count(1)


@dataclass(frozen=True, slots=True)
class Loss:
    """How a worker ended. `reason`: "stopped" (as asked), "exit", "signal", "hang"; `status` is subprocess's."""

    reason: str
    status: int
    log: Path

    def error(self, model: str) -> WorkerLost:
        how = {"exit": f"exited with status {self.status}", "signal": f"was killed by {_signal(self.status)}",
               "hang": "made no progress and was ended", "stopped": "was stopped"}[self.reason]  # fmt: skip
        return WorkerLost(
            f"the process of model {model} {how}; see {self.log}", model=model, reason=self.reason, log=str(self.log)
        )


class Owner(Protocol):
    """Who a worker reports to, on the loop's thread."""

    def ready(self, worker: Worker, info: dict[str, Any]) -> None: ...
    def failed(self, worker: Worker, problem: KvdError) -> None: ...
    def event(self, header: bytes, event: Event) -> None: ...
    def asks_store(self, worker: Worker, message: Message) -> None: ...
    def grow(self, worker: Worker, asked: Grow) -> None: ...
    def lost(self, worker: Worker, loss: Loss) -> None: ...


class Worker:
    """Owned by the loop's thread, but for the thread that waits for the process's end."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], home: Home, spec: Spec, owner: Owner) -> None:
        """Raises OSError when the system refuses another process."""
        self.spec, self._owner = spec, owner
        self.born = self._heard = time.monotonic()
        self.beat = Beat("loading", 0.0, 0.0, {})
        self.info: dict[str, Any] = {}
        self._unsent: list[Frames] = []
        self._verdict: str | None = None
        self._killer: asyncio.TimerHandle | None = None
        self._clearing: dict[int, asyncio.Future[Cleared]] = {}
        self._loop = asyncio.get_running_loop()
        self._lane = Lane(_bind(context, spec.socket), self._received, self._flush)
        try:
            self._spawned: Spawned = spawn(spec, home)
        except OSError:
            self._close_lane()
            raise
        threading.Thread(target=self._wait, name=f"wait-{spec.name}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._spawned.process.pid

    @property
    def run(self) -> int:
        return self.spec.run

    @property
    def model(self) -> str:
        return self.spec.name

    @property
    def log(self) -> Path:
        return self._spawned.log

    def send(self, message: ToWorker) -> None:
        frames = message.encode().frames()
        if self._unsent or self._lane.send(frames) is not Sent.OK:
            self._unsent.append(frames)

    async def clear(self, namespaces: tuple[bytes, ...] = ()) -> Cleared:
        """Make it forget what its memory holds and no request uses (of some namespaces). Raises Timeout when it does
        not answer; of a worker that ends meanwhile everything is gone."""
        number = next(CLEARS)
        answer = self._clearing[number] = self._loop.create_future()
        self.send(Clear(number, namespaces))
        try:
            return await asyncio.wait_for(answer, CLEAR_S)
        except TimeoutError:
            raise Timeout(
                f"model {self.model} did not clear its memory within {CLEAR_S:g} s", limit_s=CLEAR_S, stage="clear"
            ) from None
        finally:
            del self._clearing[number]

    def stop(self, drain_s: float) -> None:
        """Ask it to end within `drain_s` seconds; later it is killed. It ends as "stopped"."""
        self._verdict = "stopped"
        self.send(Stop(drain_s))
        self._kill_in(drain_s + STOP_GRACE_S)

    def kill(self, verdict: str = "stopped") -> None:
        self._verdict = verdict
        self._spawned.process.kill()

    def quiet_for(self, now: float) -> float:
        """Seconds without a sign of progress: no beat, or a beat that says so."""
        since = 0.0 if self.beat.phase == "idle" else self.beat.since_s
        return now - self._heard + since

    def forgive(self, now: float) -> None:
        """The front itself was asleep: count silence from now."""
        self._heard = now

    def _received(self, frames: Frames) -> None:
        try:
            message = wire.parse(frames)
            if message.kind in EVENT_KINDS:
                self._owner.event(frames[0], Event(message.kind, message.id, message.packed))
            elif message.kind in STORE_KINDS:
                self._owner.asks_store(self, message)
            else:
                self._handle(to_front(message))
        except ProtocolError as problem:
            logger.error("worker speaks nonsense", model=self.spec.name, problem=problem.message)
            self.kill("exit")

    def _handle(self, message: ToFront) -> None:
        match message:
            case Beat():
                self.beat, self._heard = message, time.monotonic()
            case Ready():
                self.info = message.info
                self.beat, self._heard = Beat("idle", 0.0, 0.0, self.beat.stats), time.monotonic()
                self._owner.ready(self, message.info)
            case Failed():
                self._owner.failed(self, message.problem())
            case Grow():
                self._owner.grow(self, message)
            case Cleared():
                self._cleared(message)

    def _cleared(self, message: Cleared) -> None:
        answer = self._clearing.get(message.q)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def _flush(self) -> None:
        while self._unsent and self._lane.send(self._unsent[0]) is Sent.OK:
            self._unsent.pop(0)

    def _kill_in(self, seconds: float) -> None:
        if self._killer is not None:
            self._killer.cancel()
        self._killer = self._loop.call_later(seconds, self._spawned.process.kill)

    def _wait(self) -> None:
        self._spawned.process.wait()
        with suppress(RuntimeError):  # the loop is closed: the front itself is ending
            self._loop.call_soon_threadsafe(self._loop.call_later, LAST_WORDS_S, self._bury)

    def _bury(self) -> None:
        for number in self._clearing:
            self._cleared(Cleared(number, 0, 0, 0))
        status = self._spawned.process.returncode
        reason = self._verdict or ("signal" if status < 0 else "exit")
        if self._killer is not None:
            self._killer.cancel()
        self._close_lane()
        os.close(self._spawned.leash)
        self._spawned.record.unlink(missing_ok=True)
        shutil.rmtree(self._spawned.tmp, ignore_errors=True)
        _tidy_logs(self._spawned.log, keep=reason != "stopped")
        self._owner.lost(self, Loss(reason, status, self._spawned.log))

    def _close_lane(self) -> None:
        self._lane.close()
        self.spec.socket.unlink(missing_ok=True)


def _bind(context: zmq.Context[zmq.Socket[bytes]], path: Path) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_BODY)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 1000)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(f"ipc://{path}")
    return socket


def _tidy_logs(log: Path, keep: bool) -> None:
    """The log of a run that ended as asked goes when it is empty; of the others the newest are kept."""
    with suppress(OSError):
        if not keep and log.stat().st_size == 0:
            log.unlink()
        for old in sorted(log.parent.glob("worker-*.log"), key=lambda p: p.stat().st_mtime)[:-KEPT_LOGS]:
            old.unlink()


def _signal(status: int) -> str:
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
