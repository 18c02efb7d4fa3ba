"""From SSD to memory: reader threads put shards straight into the pool's reserved rows and check every byte there."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import structlog

from kvd.store.files import Files
from kvd.worker.arrival import Arrival
from kvd.worker.patience import HUNG_S

log = structlog.get_logger()


class Readers:
    """Threads that read shards in parallel. `told(arrival)` is called on one of them for every group that is through,
    or every piece, as the arrival wants it, and for every piece that comes back after its arrival was stopped.

    A disk that hangs holds a thread within a read: there is no other end to that than the read's own.
    """

    def __init__(
        self, files: Files, told: Callable[[Arrival], None], threads: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.files = files
        self._told = told
        self._clock = clock
        self._pieces: queue.SimpleQueue[tuple[Arrival, int, int] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._reading: dict[int, tuple[Arrival, int, float]] = {}
        """by thread: whose block it reads, which, and since when"""
        self._back_at = clock()
        """when the last read came back"""
        self._warned = False
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, args=(n,), name=f"reader-{n}", daemon=True) for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, arrival: Arrival) -> None:
        """Read all of it, group by group."""
        for group in range(len(arrival.groups)):
            for block in range(len(arrival.orders)):
                self._pieces.put((arrival, group, block))

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

    def due(self, arrival: Arrival) -> float:
        """When an arrival is to be stopped, if no read comes back until then: one of its own, or one of every thread,
        has then taken HUNG_S."""
        with self._lock:
            reading = list(self._reading.values())
        if own := [since for whose, _, since in reading if whose is arrival]:
            return min(own) + HUNG_S
        busy = len(reading) == len(self._threads)
        return HUNG_S + (max(since for _, _, since in reading) if busy else self._clock())

    def stop(self, arrival: Arrival) -> None:
        """Begin nothing more of it. Afterwards nobody writes to its blocks but those that `reading` names."""
        with self._lock:
            arrival.stop()
            warned, self._warned = self._warned, True
        if not warned:
            path = arrival.orders[0].entry.path
            log.warning("the disk hangs: what it has of prompts is computed", seconds=HUNG_S, path=path)

    def reading(self, arrival: Arrival) -> set[int]:
        """Blocks of it that readers are at."""
        with self._lock:
            return {block for whose, block, _ in self._reading.values() if whose is arrival}

    def close(self, wait_s: float) -> None:
        """Ends the threads after the pieces in hand; what was not begun is left. Waits at most `wait_s` seconds, not at
        all for a disk that hangs."""
        self._closing = True
        for _ in self._threads:
            self._pieces.put(None)
        until = time.monotonic() + (0.0 if self.hung else wait_s)
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))

    # --- its threads

    def _run(self, number: int) -> None:
        while (piece := self._pieces.get()) is not None and not self._closing:
            arrival, group, block = piece
            with self._lock:  # of one that was stopped nothing is begun: see `stop`
                if arrival.stopped:
                    continue
                self._reading[number] = arrival, block, self._clock()
            through = arrival.read(self.files, group, block)
            self._back(number)
            if through or arrival.stopped:
                self._told(arrival)

    def _back(self, number: int) -> None:
        with self._lock:
            del self._reading[number]
            self._back_at = self._clock()
            again = self._warned and not self._held()
            self._warned = self._warned and not again
        if again:
            log.info("the disk answers again")

    def _held(self) -> int:
        now = self._clock()
        return sum(now >= since + HUNG_S for _, _, since in self._reading.values())
