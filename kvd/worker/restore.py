"""From SSD to memory: reader threads put shards straight into the pool's reserved rows and check every byte there."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import structlog

from kvd.store.files import Files
from kvd.worker.arrival import Arrival
from kvd.worker.patience import HUNG_S

PROBE_BYTES: Final = 1 << 16
log = structlog.get_logger()


class _Probe:
    """In place of an arrival: a file that nobody waits for. That its read comes back is all there is to it."""

    stopped = False

    def __init__(self, path: str) -> None:
        self._path = path

    def path(self, block: int) -> str:
        return self._path

    def read(self, files: Files, group: int, block: int) -> bool:
        """An error is an answer too."""
        with suppress(OSError):
            fd = files.open(self._path)
            try:
                files.uncached(fd)
                files.preadv(fd, [memoryview(bytearray(PROBE_BYTES))], 0)
            finally:
                files.close(fd)
        return False


class Readers:
    """Threads that read shards in parallel, a file by one of them at a time. `told(arrival)` is called on one of them
    for every group that is through, or every piece, as the arrival wants it, and for every piece that comes back after
    its arrival was stopped or while another read hangs.

    A disk that hangs holds a thread within a read: there is no other end to that than the read's own. One file that
    hangs holds one thread: what else is wanted of it waits behind that.
    """

    def __init__(
        self, files: Files, told: Callable[[Arrival], None], threads: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.files = files
        self._told = told
        self._clock = clock
        self._pieces: deque[tuple[Arrival | _Probe, int, int]] = deque()
        """(arrival, group, block) that nobody reads yet, in order"""
        self._lock = threading.Condition()
        """notified of new pieces, and of the end"""
        self._reading: dict[int, tuple[Arrival | _Probe, int, float]] = {}
        """by thread: whose block it reads, which, and since when"""
        self._back_at = clock()
        """when the last read came back"""
        self._probing = False
        self._warned = False
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, args=(n,), name=f"reader-{n}", daemon=True) for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, arrival: Arrival) -> None:
        """Read all of it, group by group."""
        groups, blocks = range(len(arrival.groups)), range(len(arrival.orders))
        with self._lock:
            self._pieces.extend((arrival, group, block) for group in groups for block in blocks)
            self._lock.notify_all()

    # --- a disk that hangs

    @property
    def hung(self) -> int:
        """Threads within a read that should have come back."""
        with self._lock:
            return self._held()

    @property
    def silent(self) -> bool:
        """Whether a read has taken HUNG_S and none has come back since it began: nothing is to be submitted then."""
        with self._lock:
            since = [began for _, _, began in self._reading.values() if began >= self._back_at]
        return bool(since) and self._clock() >= min(since) + HUNG_S

    def probe(self, paths: Sequence[str]) -> None:
        """While it is silent: read a bit of the first of these files that nobody reads. If that comes back, it is not
        silent any more: one file hangs, not the disk. One at a time, by a reader that has nothing else to do."""
        with self._lock:
            read = {whose.path(block) for whose, block, _ in self._reading.values()}
            path = next((path for path in paths if path not in read), None)
            if path is None or self._probing or len(self._reading) == len(self._threads):
                return
            self._probing = True
            self._pieces.append((_Probe(path), 0, 0))
            self._lock.notify_all()

    def due(self, arrival: Arrival) -> float:
        """When an arrival is to be stopped, if no read comes back until then: one of its own, one of those that all the
        rest of it waits behind, or one of every thread, has then taken HUNG_S."""
        with self._lock:
            reading = list(self._reading.values())
        if own := [since for whose, _, since in reading if whose is arrival]:
            return min(own) + HUNG_S
        read = {whose.path(block): since for whose, block, since in reading}
        if all(arrival.path(block) in read for block in arrival.missing):
            return HUNG_S + min((read[arrival.path(block)] for block in arrival.missing), default=self._clock())
        busy = len(reading) == len(self._threads)
        return HUNG_S + (max(since for _, _, since in reading) if busy else self._clock())

    def stop(self, arrival: Arrival) -> None:
        """Begin nothing more of it. Afterwards nobody writes to its blocks but those that `reading` names."""
        with self._lock:
            arrival.stop()
            self._pieces = deque(piece for piece in self._pieces if piece[0] is not arrival)
            warned, self._warned = self._warned, True
            whose, block, _ = min(self._reading.values(), key=lambda read: read[2], default=(arrival, 0, 0.0))
        if not warned:
            path = whose.path(block)
            log.warning("the disk hangs: what it has of prompts is computed", seconds=HUNG_S, path=path)

    def reading(self, arrival: Arrival) -> set[int]:
        """Blocks of it that readers are at."""
        with self._lock:
            return {block for whose, block, _ in self._reading.values() if whose is arrival}

    def close(self, wait_s: float) -> None:
        """Ends the threads after the pieces in hand; what was not begun is left. Waits at most `wait_s` seconds, not at
        all for a disk that hangs."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        until = time.monotonic() + (0.0 if self.hung else wait_s)
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))

    # --- its threads

    def _run(self, number: int) -> None:
        while (piece := self._next(number)) is not None:
            arrival, group, block = piece
            through = arrival.read(self.files, group, block)
            hangs = self._back(number)
            if isinstance(arrival, _Probe):
                self._probing = False
            elif through or hangs or arrival.stopped:
                self._told(arrival)

    def _next(self, number: int) -> tuple[Arrival | _Probe, int, int] | None:
        """The first piece of a file that nobody reads, when there is one; None at the end."""
        with self._lock:
            while not self._closing:
                read = {arrival.path(block) for arrival, block, _ in self._reading.values()}
                for at, (arrival, group, block) in enumerate(self._pieces):
                    if arrival.path(block) not in read:
                        del self._pieces[at]
                        self._reading[number] = arrival, block, self._clock()
                        return arrival, group, block
                self._lock.wait()
        return None

    def _back(self, number: int) -> bool:
        """A read came back, and its thread takes the next piece. True: another one hangs."""
        with self._lock:
            silent = self.silent
            del self._reading[number]
            self._back_at = self._clock()
            hung = self._held()
            again = self._warned and (silent or not hung)
            self._warned = self._warned and not again
        if again:
            log.info("the disk answers again", reads_hung=hung)
        return hung > 0

    def _held(self) -> int:
        now = self._clock()
        return sum(now >= since + HUNG_S for _, _, since in self._reading.values())
