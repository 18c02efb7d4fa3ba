"""The worker between its socket and its engine: requests are prepared here, answers of the front handed on."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import structlog

from kvclient.errors import Cancelled, Internal, KvdError
from kvclient.wire import unpack
from kvd.cache.results import Consent
from kvd.messages import Cancel, Clear, Committed, Departed, Granted, Grow, LookedUp, Reserved, Stop, ToWorker, Work
from kvd.worker.clear import clear
from kvd.worker.outbox import Outbox

if TYPE_CHECKING:
    from kvd.worker.engine import Engine
    from kvd.worker.prompt import Prompter

PREPARERS: Final = 2
"""threads that render templates and tokenise"""
GRANT_WAIT_S: Final = 5.0
log = structlog.get_logger()


class Growth:
    """Asks the front's ledger before the pool grows. The engine's thread waits for the answer, which comes at once:
    where others have to give way first it is SOON."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, Future[Consent]] = {}
        self._late: dict[int, int] = {}
        """bytes of questions that are not waited for any more"""

    def ask(self, nbytes: int, needed: bool = False) -> Consent:
        """May the pool take `nbytes` more? Without an answer it may not; what one grants later is given back.
        Less than none is given back."""
        number, answer = next(self._numbers), Future[Consent]()
        if nbytes < 0:
            self._outbox.tell(Grow(number, nbytes))
            return Consent.YES
        with self._lock:
            self._open[number] = answer
        self._outbox.tell(Grow(number, nbytes, needed))
        with suppress(TimeoutError):
            return answer.result(GRANT_WAIT_S)
        with self._lock:
            if self._open.pop(number, None) is not None:
                self._late[number] = nbytes
                return Consent.NO
        return answer.result()

    def granted(self, message: Granted) -> None:
        with self._lock:
            answer, late = self._open.pop(message.q, None), self._late.pop(message.q, 0)
        if answer is not None:
            answer.set_result(Consent.YES if message.ok else Consent.SOON if message.coming else Consent.NO)
        elif late and message.ok:
            self._outbox.tell(Grow(next(self._numbers), -late))


class Service:
    """`receive` is called on the link's thread for every message of the front."""

    def __init__(self, outbox: Outbox, growth: Growth) -> None:
        self._outbox = outbox
        self._growth = growth
        self._pool = ThreadPoolExecutor(PREPARERS, "prepare")
        self._ready = threading.Event()
        self._engine: Engine | None = None
        self._prompter: Prompter | None = None
        self._stop: Stop | None = None
        self._lock = threading.Lock()
        self._preparing: dict[str, bool] = {}
        """requests in preparation; True: cancelled meanwhile"""

    def open(self, engine: Engine, prompter: Prompter) -> None:
        """The model is loaded: work may come."""
        self._engine, self._prompter = engine, prompter
        self._ready.set()
        if self._stop is not None:
            engine.stop(self._stop.drain_s)

    def receive(self, message: ToWorker) -> None:
        engine = self._engine
        match message:
            case Work():
                with self._lock:
                    self._preparing[message.id] = False
                self._pool.submit(self._prepare, message, time.monotonic())
            case Granted():
                self._growth.granted(message)
            case Stop():
                self._stop = message
                if engine is not None:
                    engine.stop(message.drain_s)
            case _ if engine is None:
                return  # answers to questions that only an engine asks
            case Cancel():
                with self._lock:
                    if message.id in self._preparing:
                        self._preparing[message.id] = True
                        return
                engine.cancel(message.id, message.reason)
            case LookedUp():
                engine.looked_up(message)
            case Reserved():
                engine.reserved(message)
            case Committed():
                engine.committed(message)
            case Departed():
                engine.on_cache(lambda cache: engine.spill.departed(message, cache.index))
            case Clear():
                engine.on_cache(lambda cache: self._outbox.tell(clear(cache, message)))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, work: Work, arrival: float) -> None:
        self._ready.wait()
        assert self._engine is not None and self._prompter is not None
        try:
            prompt = self._prompter.prepare(work.kind, unpack(work.packed))
        except KvdError as problem:
            self._refuse(work.id, problem)
            return
        except Exception as problem:  # the border of one request: it ends with the error
            log.error("a request could not be prepared", id=work.id, exc_info=problem)
            self._refuse(work.id, Internal(f"preparing the prompt failed: {type(problem).__name__}"))
            return
        with self._lock:  # a cancel comes before this or behind it
            if self._preparing.pop(work.id, False):
                self._outbox.event("error", work.id, Cancelled("cancelled before it began").to_wire())
            elif work.kind == "count":
                self._outbox.event("result", work.id, {"tokens": len(prompt.tokens)})
            else:
                self._engine.submit(work.kind, work.id, prompt, arrival)

    def _refuse(self, id: str, problem: KvdError) -> None:
        with self._lock:
            self._preparing.pop(id, None)
        self._outbox.event("error", id, problem.to_wire())
