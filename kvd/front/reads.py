"""Reads of a disk that may hang, for the loop's thread: in threads that hold up neither it nor the daemon's end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from kvclient.errors import KvdError

PATIENCE_S = 2.0
"""seconds after which whoever can do with what was read before goes on with that"""
T = TypeVar("T")


async def in_thread(read: Callable[[], T]) -> T:
    """As `asyncio.to_thread`, whose threads are few and hold up the end of the process: this one may hang for ever."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(read())
        except BaseException as problem:  # noqa: BLE001  it belongs to the one who asked
            answer.set_exception(problem)

    answer.set_running_or_notify_cancel()  # from now on it cannot be cancelled: nothing could
    threading.Thread(target=run, name="read", daemon=True).start()
    return await asyncio.wrap_future(answer)


class Reads(Generic[T]):
    """One thing that is read again and again, by one thread at a time. Who asks gets what a call of `read` gave that
    began later. Owned by the loop's thread."""

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._turn = asyncio.Lock()
        self._next: asyncio.Task[T | KvdError] | None = None
        self._began: float | None = None
        """when the call in hand did"""
        self._late = False
        """it was waited for in vain"""
        self._last: T | KvdError | None = None

    @property
    def hung_s(self) -> float:
        """Seconds that the call in hand has taken, if it was waited for in vain; else 0."""
        return time.monotonic() - self._began if self._late and self._began is not None else 0.0

    @property
    def last(self) -> T | None:
        """What the newest call gave that came back; None: none did, or it failed."""
        return None if isinstance(self._last, KvdError) else self._last

    async def fresh(self) -> T:
        """As it is now, however long that takes. Raises what `read` raises."""
        return _given(await asyncio.shield(self._call()))

    async def newest(self) -> T | None:
        """As it is now; while the disk does not answer as it was last, None if that is not known. Raises KvdError where
        that is what `read` raised."""
        if not self.hung_s:
            call = self._call()
            await asyncio.wait({call}, timeout=PATIENCE_S)
            if call.done():
                return _given(call.result())
            self._late = self._began is not None
        return None if self._last is None else _given(self._last)

    def _call(self) -> asyncio.Task[T | KvdError]:
        """The one that has not begun yet."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._run())
        return self._next

    async def _run(self) -> T | KvdError:
        async with self._turn:
            self._next, self._began = None, time.monotonic()
            try:
                self._last = await in_thread(self._read)
            except KvdError as problem:
                self._last = problem
            finally:
                self._began, self._late = None, False
            return self._last


def _given(answer: T | KvdError) -> T:
    if isinstance(answer, KvdError):
        raise answer.with_traceback(None)  # of the last time: it may be told as long as the disk hangs
    return answer
