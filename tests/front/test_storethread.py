"""The store's thread answers whatever happens in the store, commits in groups, and never ends serving."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvclient.errors import StoreError
from kvclient.wire import Message
from kvd.front import notices, storethread
from kvd.front.storethread import StoreThread
from kvd.messages import (
    Abandon,
    BadShard,
    Committed,
    CommittedItem,
    Departed,
    Entry,
    LookedUp,
    Lookup,
    Offer,
    Reserve,
    Reserved,
    Touched,
    ToWorker,
    Written,
)
from kvd.store.base import Found, Limits, Refusal, Reservation
from kvd.store.departed import EVERYTHING, Departure

ENTRY = Entry(b"c", b"p", 4, "/x", 10, b"s")
LOOKUP = Lookup(1, b"n", (b"c",), b"n", (1, 2, 3, 4))
RESERVE = Reserve(2, Offer(b"n", b"c", b"n", (1,), 0, 10, "words"))


@dataclass
class FakeStore:
    """Counts calls; `broken` raises in every one; `gate` holds the thread inside `lookup`."""

    broken: bool = False
    gate: threading.Event | None = None
    inside: threading.Event = field(default_factory=threading.Event)
    commits: list[int] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    thread: set[int] = field(default_factory=set)
    left: tuple[Departure, ...] = ()
    lost: str = ""
    blocks: int = 3
    at_close: Callable[[], None] = lambda: None

    def _call(self, name: str) -> None:
        self.calls.append(name)
        self.thread.add(threading.get_ident())
        if self.broken:
            raise OSError(5, "Input/output error")

    def lookup(self, namespace: bytes, chains: Sequence[bytes], parent: bytes, tail: Sequence[int]) -> Found:
        self._call("lookup")
        if self.gate is not None:
            self.inside.set()
            assert self.gate.wait(10)
        return Found((ENTRY,), None, 0)

    def reserve(self, offer: Offer) -> Reservation | Refusal:
        self._call("reserve")
        return Reservation(7, offer, "/tmp/t", "/tmp/f")

    def label(self, namespace: bytes, model: str) -> None:
        self._call(f"label {model}")

    def commit(self, written: list[Written]) -> list[CommittedItem]:
        self.commits.append(len(written))
        self._call("commit")
        return [CommittedItem(one.reservation, True) for one in written]

    def abandon(self, reservation: int, reason: str) -> None:
        self._call(f"abandon {reservation} {reason}")

    def touched(self, namespace: bytes, chains: Sequence[bytes]) -> None:
        self._call("touched")

    def pin(self, namespace: bytes, chains: Sequence[bytes], ttl_s: float | None = None) -> object:
        self._call("pin")
        return None

    def quarantine(self, namespace: bytes, chain: bytes, reason: str) -> None:
        self._call("quarantine")

    def departed(self) -> tuple[Departure, ...]:
        left, self.left = self.left, ()
        return left

    def gone(self) -> str:
        return self.lost

    def tend(self) -> bool:
        return False

    def set_limits(self, limits: Limits) -> None:
        self._call("set_limits")

    def stats(self) -> dict[str, Any]:
        return {"blocks": self.blocks, "counters": {"lookups": 2}}

    def close(self) -> None:
        self.calls.append("close")
        self.at_close()


@dataclass(eq=False)
class Worker:
    """Answers arrive in `got`."""

    run: int = 1
    model: str = "demo"
    got: asyncio.Queue[ToWorker] = field(default_factory=asyncio.Queue)

    def send(self, message: ToWorker) -> None:
        self.got.put_nowait(message)

    async def next(self) -> ToWorker:
        return await asyncio.wait_for(self.got.get(), 10)


def with_store(store: FakeStore | Exception, test: Callable[[StoreThread, Worker], Awaitable[None]]) -> None:
    def open_store() -> FakeStore:
        if isinstance(store, Exception):
            raise store
        return store

    async def main() -> None:
        thread = StoreThread(open_store)
        await test(thread, Worker())
        await thread.close(10)

    asyncio.run(main())


def sent(*messages: Any) -> list[Message]:
    return [message.encode() for message in messages]


def test_questions_are_answered_in_order_by_one_thread_that_is_not_the_loops() -> None:
    store = FakeStore()

    async def test(thread: StoreThread, worker: Worker) -> None:
        for message in sent(LOOKUP, RESERVE, Written(7, b"s", 10), Touched(b"n", ()), BadShard(b"n", b"c", "x")):
            thread.ask(worker, message)
        assert await worker.next() == LookedUp(1, (ENTRY,), None, 0)
        assert await worker.next() == Reserved(2, True, 7, "/tmp/t", "/tmp/f")
        assert await worker.next() == Committed((CommittedItem(7, True),))
        assert await thread.do(lambda s: s.stats()) == {"blocks": 3, "counters": {"lookups": 2}}

    with_store(store, test)
    assert store.calls == ["lookup", "label demo", "label demo", "reserve", "touched", "quarantine", "commit", "close"]
    assert len(store.thread) == 1 and threading.get_ident() not in store.thread


def test_all_that_was_written_meanwhile_is_one_commit() -> None:
    store = FakeStore(gate=threading.Event())

    async def test(thread: StoreThread, worker: Worker) -> None:
        other = Worker(run=2)
        thread.ask(worker, LOOKUP.encode())
        await asyncio.to_thread(store.inside.wait, 10)
        for number in range(5):
            thread.ask(worker, Written(number, b"s", 10).encode())
        thread.ask(other, Written(9, b"s", 10).encode())
        assert store.gate is not None
        store.gate.set()
        await worker.next()
        assert await worker.next() == Committed(tuple(CommittedItem(n, True) for n in range(5)))
        assert await other.next() == Committed((CommittedItem(9, True),))

    with_store(store, test)
    assert store.commits == [6]


def test_a_store_that_fails_in_every_call_gives_misses_refusals_and_counts() -> None:
    async def test(thread: StoreThread, worker: Worker) -> None:
        for message in sent(LOOKUP, RESERVE, Written(3, b"s", 10), Touched(b"n", ()), Abandon(1, "x")):
            thread.ask(worker, message)
        assert await worker.next() == LookedUp(1, (), None, 0)
        assert await worker.next() == Reserved(2, False, reason="store_unavailable")
        assert await worker.next() == Committed((CommittedItem(3, False, "store_unavailable"),))
        counts = thread.counts()
        assert [counts[f"{what}_failed_OSError"] for what in ("lookup", "reserve", "commit", "touched")] == [1, 1, 1, 1]

    with_store(FakeStore(broken=True), test)


@pytest.mark.parametrize("problem", [StoreError("in use by process 5", pid=5), OSError(13, "Permission denied")])
def test_without_a_store_serving_goes_on_and_status_says_why(problem: Exception) -> None:
    async def test(thread: StoreThread, worker: Worker) -> None:
        thread.ask(worker, LOOKUP.encode())
        thread.ask(worker, RESERVE.encode())
        assert await worker.next() == LookedUp(1, (), None, 0)
        assert await worker.next() == Reserved(2, False, reason="store_unavailable")
        status = thread.status()
        assert not status["available"] and str(problem) in status["problem"]
        with pytest.raises(StoreError, match="not available"):
            await thread.do(lambda s: s.stats())

    with_store(problem, test)


def test_while_the_store_is_opened_status_says_so_questions_wait_and_an_end_does_not() -> None:
    gate, inside = threading.Event(), threading.Event()

    def open_store() -> FakeStore:
        inside.set()
        assert gate.wait(60)
        return FakeStore()

    async def main() -> None:
        thread, worker = StoreThread(open_store), Worker()
        thread.ask(worker, LOOKUP.encode())
        await asyncio.to_thread(inside.wait, 10)
        assert thread.status()["problem"] == "opening" and worker.got.empty()
        gate.set()
        assert await worker.next() == LookedUp(1, (ENTRY,), None, 0)
        await thread.close(10)

        inside.clear()
        gate.clear()
        second = StoreThread(open_store)
        await asyncio.to_thread(inside.wait, 10)
        await second.close(1000)
        gate.set()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_store_whose_disk_comes_back_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storethread, "RETRY_S", 0.0)
    attempts: list[Any] = [OSError(2, "No such file"), FakeStore()]

    def open_store() -> FakeStore:
        found = attempts.pop(0)
        if isinstance(found, OSError):
            raise found
        assert isinstance(found, FakeStore)
        return found

    async def main() -> None:
        thread, worker = StoreThread(open_store), Worker()
        while attempts:
            thread.ask(worker, LOOKUP.encode())
            await worker.next()
        assert await thread.do(lambda s: s.stats()) == {"blocks": 3, "counters": {"lookups": 2}}
        assert thread.status()["available"] and "problem" not in thread.status()
        await thread.close(10)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_store_whose_folder_is_gone_is_given_up_counted_and_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storethread, "TEND_S", 0.01)
    monkeypatch.setattr(storethread, "RETRY_S", 0.01)
    first, second = FakeStore(), FakeStore()
    attempts: list[FakeStore | StoreError] = [first, StoreError("not mounted"), second]

    def open_store() -> FakeStore:
        found = attempts.pop(0)
        if isinstance(found, StoreError):
            raise found
        return found

    async def main() -> None:
        thread, worker = StoreThread(open_store), Worker()
        thread.ask(worker, LOOKUP.encode())
        assert isinstance(await worker.next(), LookedUp)
        while not thread.counts().get("lookups"):
            await asyncio.sleep(0.01)
        first.lost = "deleted"
        assert await worker.next() == Departed((), (), everything=True)
        while attempts:
            await asyncio.sleep(0.01)
        assert await thread.do(lambda s: s) is second  # type: ignore[comparison-overlap]
        assert first.calls[-1] == "close"
        counts = thread.counts()
        assert (counts["store_lost"], counts["store_unavailable"]) == (1, 1) and counts["lookups"] >= 2
        await thread.close(10)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_store_that_is_counted_as_lost_is_not_shown_as_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storethread, "TEND_S", 0.01)
    store = FakeStore()
    attempts, shown = [store], list[tuple[bool, int]]()

    def open_store() -> FakeStore:
        look()
        if not attempts:
            raise StoreError("not there")
        return attempts.pop()

    def look() -> None:
        if thread is not None:
            shown.append((thread.status()["available"], thread.counts().get("store_lost", 0)))

    thread: StoreThread | None = None

    async def main() -> None:
        nonlocal thread
        thread = StoreThread(open_store)
        await thread.do(lambda s: None)
        store.at_close, store.lost = look, "deleted"
        while not shown or not shown[-1][1]:
            await asyncio.sleep(0.01)
        await thread.close(10)

    asyncio.run(asyncio.wait_for(main(), 20))
    assert (False, 1) in shown and (True, 1) not in shown


def test_what_a_lost_worker_had_reserved_is_abandoned() -> None:
    store = FakeStore()

    async def test(thread: StoreThread, worker: Worker) -> None:
        thread.ask(worker, RESERVE.encode())
        await worker.next()
        thread.forget(worker.run)
        thread.forget(worker.run)
        await thread.do(lambda s: None)

    with_store(store, test)
    assert store.calls.count("abandon 7 worker_lost") == 1


def test_what_a_lost_worker_had_written_is_committed_though_both_come_at_once() -> None:
    store = FakeStore(gate=threading.Event())

    async def test(thread: StoreThread, worker: Worker) -> None:
        thread.ask(worker, RESERVE.encode())
        await worker.next()
        thread.ask(worker, LOOKUP.encode())
        await asyncio.to_thread(store.inside.wait, 10)
        thread.ask(worker, Written(7, b"s", 10).encode())
        thread.forget(worker.run)
        assert store.gate is not None
        store.gate.set()
        await thread.do(lambda s: None)

    with_store(store, test)
    assert store.commits == [1] and "abandon 7 worker_lost" not in store.calls


def test_who_no_longer_waits_for_an_answer_does_not_end_the_thread() -> None:
    store = FakeStore(gate=threading.Event())

    async def test(thread: StoreThread, worker: Worker) -> None:
        thread.ask(worker, LOOKUP.encode())
        await asyncio.to_thread(store.inside.wait, 10)
        asked = asyncio.create_task(thread.do(lambda s: s.calls.append("asked")))
        await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert store.gate is not None
        store.gate.set()
        assert await asyncio.wait_for(thread.do(lambda s: "alive"), 10) == "alive"

    with_store(store, test)
    assert "asked" not in store.calls


def test_questions_beyond_the_limit_are_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore(gate=threading.Event())
    monkeypatch.setattr(storethread, "MOST", 3)

    async def test(thread: StoreThread, worker: Worker) -> None:
        thread.ask(worker, LOOKUP.encode())
        await asyncio.to_thread(store.inside.wait, 10)
        for _ in range(4):
            thread.ask(worker, LOOKUP.encode())
        thread.ask(worker, LOOKUP.encode())
        thread.ask(worker, RESERVE.encode())
        assert await worker.next() == LookedUp(1, (), None, 0)
        assert await worker.next() == Reserved(2, False, reason="store_busy")
        assert thread.counts()["store_busy"] == 2
        assert store.gate is not None
        store.gate.set()

    with_store(store, test)


def test_workers_of_a_namespace_are_told_what_left_the_store_and_before_what_comes_back() -> None:
    store = FakeStore()

    async def test(thread: StoreThread, worker: Worker) -> None:
        stranger, gone = Worker(run=2), Worker(run=3)
        thread.ask(worker, LOOKUP.encode())
        thread.ask(gone, LOOKUP.encode())
        thread.ask(stranger, Touched(b"n", ()).encode())
        thread.forget(gone.run)
        assert isinstance(await worker.next(), LookedUp)

        def leave(departures: tuple[Departure, ...]) -> None:
            store.left = departures

        await thread.do(lambda s: leave((Departure(b"n", (b"c", b"d"), (b"p",)), Departure(b"m", (b"x",), (b"m",)))))
        thread.ask(worker, Written(7, b"s", 10).encode())
        assert await worker.next() == Departed((b"c", b"d"), (b"p",))
        assert isinstance(await worker.next(), Committed)
        await thread.do(lambda s: leave((EVERYTHING,)))
        assert await worker.next() == Departed((), (), everything=True)
        assert stranger.got.empty() and gone.got.qsize() == 1

    with_store(store, test)


def test_nonsense_from_a_worker_is_counted_and_dropped() -> None:
    async def test(thread: StoreThread, worker: Worker) -> None:
        thread.ask(worker, Message("lookup", "-", b"\x80"))
        await thread.do(lambda s: None)
        assert thread.counts()["malformed"] == 1

    with_store(FakeStore(), test)


def test_blocks_that_a_lower_limit_took_are_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[dict[str, Any]] = []
    monkeypatch.setattr(notices.logger, "warning", lambda event, **fields: said.append({"event": event, **fields}))
    gone = {"blocks": 5, "bytes": 50, "pinned": 2}
    watch = notices.Notices()
    for trimmed in ({}, gone, gone, {}):
        watch.say({"path": "/s", "limit": 10, "trimmed": trimmed})
    assert said == [{"event": "store limit took blocks", "path": "/s", "limit": 10, **gone}]


def test_status_shows_at_once_what_a_call_changed() -> None:
    async def test(thread: StoreThread, _: Worker) -> None:
        for blocks in (5, 0):
            await thread.do(lambda store, now=blocks: setattr(store, "blocks", now))
            assert thread.status()["blocks"] == blocks

    with_store(FakeStore(), test)
