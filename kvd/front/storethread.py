"""The store, in the one thread of the front that may touch it. What fails in it becomes a counted reason and an answer;
serving goes on without it."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from kvclient.errors import KvdError, ProtocolError, StoreError
from kvclient.wire import Message
from kvd.front.audience import Audience
from kvd.front.logs import logger
from kvd.front.notices import Notices
from kvd.front.storelike import Asker, StoreLike, nothing, reserve
from kvd.messages import (
    Abandon,
    BadShard,
    Committed,
    CommittedItem,
    LookedUp,
    Lookup,
    PinPath,
    Reserve,
    Reserved,
    Touched,
    ToWorker,
    Written,
    to_front,
)
from kvd.store.base import Found, Limits, Refusal
from kvd.store.departed import EVERYTHING, Departure

MOST = 4096
"""asks that may wait; beyond it lookups find nothing and reservations are refused"""
TEND_S = 2.0
"""between rounds of the store's own upkeep"""
RETRY_S = 5.0
"""between attempts to open a store that could not be opened, or whose folder is gone"""
OPENING_S = 0.5
"""when the daemon stops, for a store that is about to be open"""
UNAVAILABLE = "store_unavailable"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Ask:
    asker: Asker
    message: Message


@dataclass(frozen=True, slots=True)
class _Forget:
    run: int


@dataclass(frozen=True, slots=True)
class _Do:
    use: Callable[[Any], Any]
    answer: Future[Any]


class StoreThread:
    """`ask`, `forget`, `do`, `status` and `close` are for the loop's thread; all else happens in the store's."""

    def __init__(self, open_store: Callable[[], StoreLike]) -> None:
        self._open = open_store
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[_Ask | _Forget | _Do | None] = queue.SimpleQueue()
        self._store: StoreLike | None = None
        self._problem = "opening"
        self._notices = Notices()
        self._counts: Counter[str] = Counter()
        self._runs: dict[int, int] = {}
        self._audience: Audience[Asker] = Audience()
        self._stats: dict[str, Any] = {}
        self._stats_at = 0.0
        self._tend_at = self._retry_at = 0.0
        self._thread = threading.Thread(target=self._main, name="store", daemon=True)
        self._thread.start()

    def ask(self, asker: Asker, message: Message) -> None:
        """A worker's message to the store; its answer, if it has one, goes to the worker."""
        if self._queue.qsize() > MOST and message.kind in ("lookup", "reserve"):
            self._counts["store_busy"] += 1
            asker.send(nothing(to_front(message), "store_busy"))
            return
        self._queue.put(_Ask(asker, message))

    def forget(self, run: int) -> None:
        """That worker is gone: what it had reserved is free again."""
        self._queue.put(_Forget(run))

    async def do(self, use: Callable[[Any], T]) -> T:
        """Call `use(store)` in the store's thread. Raises StoreError when there is no store, else what `use` raises."""
        answer: Future[T] = Future()
        self._queue.put(_Do(use, answer))
        return await asyncio.wrap_future(answer)

    def set_limits(self, limits: Limits) -> None:
        self._queue.put(_Do(lambda store: store.set_limits(limits), Future()))

    def status(self) -> dict[str, Any]:
        """The newest numbers of the store, without waiting for it."""
        front = {"available": self._store is not None, "waiting": self._queue.qsize(), "counters": self.counts()}
        return {**self._stats, **front, **({"problem": self._problem} if self._problem else {})}

    def counts(self) -> dict[str, int]:
        """What the store did, dropped or refused, by reason: its own counters and those of this thread."""
        mine = dict(self._counts)  # one step of the interpreter: the other thread adds to it
        return dict(Counter(self._stats.get("counters", {})) + Counter(mine))

    async def close(self, timeout_s: float) -> None:
        """Commit what is pending and close the store; gives up waiting after `timeout_s`. One that is being opened is
        not waited for: to end there is what a kill would do."""
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join, timeout_s if self._store is not None else OPENING_S)

    def _main(self) -> None:
        while self._turn():
            self._refresh()
        self._guard("close", lambda store: store.close(), None)

    def _open_again(self) -> None:
        """At the start, and from time to time while there is no store: its disk may come back."""
        self._retry_at = time.monotonic() + RETRY_S
        try:
            self._store = self._open()
            logger.info("store is open", before=self._problem)
            self._problem = ""
        except Exception as problem:  # noqa: BLE001  the edge of the thread: whatever it is, serving goes on
            if str(problem) != self._problem:
                logger.error("store unavailable", problem=str(problem), kind=type(problem).__name__)
            self._problem = str(problem)
            self._counts[UNAVAILABLE] += 1

    def _turn(self) -> bool:
        """Everything that is waiting: first in order, then one commit for all shards written. False at the end."""
        if self._store is None and time.monotonic() >= self._retry_at:
            self._open_again()
        written: list[tuple[Asker, Written]] = []
        going = True
        for item in self._take():
            match item:
                case None:
                    going = False
                case _Ask():
                    self._answer(item, written)
                case _Forget(run):
                    self._settle(written)
                    self._forget(run)
                case _Do():
                    self._do(item)
        self._settle(written)
        return going

    def _settle(self, written: list[tuple[Asker, Written]]) -> None:
        """Say what left the store, then commit: a block that left and came back comes back later."""
        self._tell(self._guard("departed", lambda store: store.departed(), ()))
        if written:
            self._commit(written)
            written.clear()

    def _take(self) -> list[_Ask | _Forget | _Do | None]:
        """What is waiting; nothing, after a while, when upkeep is due."""
        pause = self._tend_at - time.monotonic()
        try:
            items = [self._queue.get(timeout=pause)] if pause > 0 else []
        except queue.Empty:
            items = []
        while not self._queue.empty():
            items.append(self._queue.get())
        if time.monotonic() >= self._tend_at:
            self._look()
            more = self._guard("tend", lambda store: store.tend(), False)
            self._tend_at = time.monotonic() + (0.0 if more else TEND_S)
        return items

    def _look(self) -> None:
        """A store whose folder was deleted, or whose disk was unmounted, is given up, and opened again once that can
        be. What it counted stays counted."""
        problem = self._guard("look", lambda store: store.gone(), "")
        if not problem:
            return
        logger.error("store lost", problem=problem)
        self._guard("close", lambda store: store.close(), None)
        self._counts += Counter(self._stats.get("counters", {}))
        self._store, self._stats, self._problem, self._retry_at = None, {}, problem, 0.0
        self._counts["store_lost"] += 1  # the last: whoever sees it sees no store, until there is one again
        self._runs.clear()
        self._tell((EVERYTHING,))

    def _guard(self, what: str, use: Callable[[StoreLike], Any], otherwise: Any) -> Any:
        """Use the store; when that fails count why, and give `otherwise`."""
        if self._store is None:
            return otherwise
        try:
            return use(self._store)
        except Exception as problem:  # noqa: BLE001  the edge of the thread: no error of the store may end serving
            reason = problem.code if isinstance(problem, KvdError) else type(problem).__name__
            self._counts[f"{what}_failed_{reason}"] += 1
            logger.error("store failed", what=what, exc_info=problem)
            return otherwise

    def _answer(self, ask: _Ask, written: list[tuple[Asker, Written]]) -> None:
        try:
            message = to_front(ask.message)
        except ProtocolError as problem:
            self._counts["malformed"] += 1
            logger.error("worker speaks nonsense", model=ask.asker.model, problem=problem.message)
            return
        match message:
            case Lookup(q, namespace, chains, parent, tail):
                found = self._guard("lookup", lambda s: s.lookup(namespace, chains, parent, tail), Found())
                if found.hits or found.child is not None:
                    self._audience.join(namespace, ask.asker)
                self._send(ask.asker, LookedUp(q, found.hits, found.child, found.child_rows, found.child_token))
                if found.hits:
                    self._guard("label", lambda s: s.label(namespace, ask.asker.model), None)
            case Reserve():
                self._reserve(ask.asker, message)
            case Written():
                written.append((ask.asker, message))
            case Abandon(reservation, reason):
                self._abandon(reservation, reason)
            case BadShard(namespace, chain, reason):
                self._guard("quarantine", lambda s: s.quarantine(namespace, chain, reason), None)
            case Touched(namespace, chains):
                self._guard("touched", lambda s: s.touched(namespace, chains), None)
            case PinPath(namespace, chains, ttl_s):
                self._guard("pin", lambda s: s.pin(namespace, chains, ttl_s or None), None)

    def _reserve(self, asker: Asker, asked: Reserve) -> None:
        self._audience.join(asked.offer.namespace, asker)
        made = self._guard("reserve", lambda s: reserve(s, asker.model, asked.offer), Refusal(UNAVAILABLE))
        if isinstance(made, Refusal):
            self._send(asker, Reserved(asked.q, False, reason=made.reason))
            return
        self._runs[made.id] = asker.run
        self._send(asker, Reserved(asked.q, True, made.id, made.temp, made.final, durable=made.durable))

    def _commit(self, written: list[tuple[Asker, Written]]) -> None:
        shards = [shard for _, shard in written]
        failed = [CommittedItem(shard.reservation, False, UNAVAILABLE) for shard in shards]
        done = self._guard("commit", lambda s: s.commit(shards), failed)
        items = {item.reservation: item for item in (*failed, *done)}
        answers: dict[Asker, list[CommittedItem]] = {}
        for asker, shard in written:
            self._runs.pop(shard.reservation, None)
            answers.setdefault(asker, []).append(items[shard.reservation])
        for asker, mine in answers.items():
            self._send(asker, Committed(tuple(mine)))

    def _abandon(self, reservation: int, reason: str) -> None:
        self._runs.pop(reservation, None)
        self._guard("abandon", lambda s: s.abandon(reservation, reason), None)

    def _tell(self, departures: Sequence[Departure]) -> None:
        """What left the store does not count as stored any more."""
        for asker, message in self._audience.told(departures):
            self._send(asker, message)

    def _forget(self, run: int) -> None:
        self._audience.leave(run)
        for reservation in [r for r, owner in self._runs.items() if owner == run]:
            self._abandon(reservation, "worker_lost")

    def _do(self, asked: _Do) -> None:
        if not asked.answer.set_running_or_notify_cancel():
            return
        if self._store is None:
            asked.answer.set_exception(StoreError(f"the store is not available: {self._problem}"))
            return
        try:
            result = asked.use(self._store)
        except Exception as problem:  # noqa: BLE001  whatever it is belongs to the one who asked
            asked.answer.set_exception(problem)
            return
        self._refresh(every_s=0.0)  # whoever cleared the store sees it empty
        asked.answer.set_result(result)

    def _send(self, asker: Asker, message: ToWorker) -> None:
        self._loop.call_soon_threadsafe(asker.send, message)

    def _refresh(self, every_s: float = 0.5) -> None:
        now = time.monotonic()
        if self._store is not None and now - self._stats_at > every_s:
            self._stats_at = now
            self._stats = self._guard("stats", lambda store: store.stats(), self._stats)
            self._notices.say(self._stats)
