"""From SSD to memory: reader threads put shards straight into the pool's reserved rows and check every byte there."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from kvd.store.files import Files
from kvd.worker.arrival import Arrival


class Readers:
    """Threads that read shards in parallel. `told(arrival)` is called on one of them for every group that is through,
    or every piece, as the arrival wants it."""

    def __init__(self, files: Files, told: Callable[[Arrival], None], threads: int = 2) -> None:
        self.files = files
        self._told = told
        self._pieces: queue.SimpleQueue[tuple[Arrival, int, int] | None] = queue.SimpleQueue()
        self._closing = False
        self._threads = [threading.Thread(target=self._run, name=f"reader-{n}", daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, arrival: Arrival) -> None:
        """Read all of it, group by group."""
        for group in range(len(arrival.groups)):
            for block in range(len(arrival.orders)):
                self._pieces.put((arrival, group, block))

    def close(self, wait_s: float) -> None:
        """Ends the threads after the pieces in hand; what was not begun is left. Waits at most `wait_s` seconds for a
        disk that does not answer."""
        self._closing = True
        for _ in self._threads:
            self._pieces.put(None)
        until = time.monotonic() + wait_s
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))

    def _run(self) -> None:
        while (piece := self._pieces.get()) is not None and not self._closing:
            arrival, group, block = piece
            if arrival.read(self.files, group, block):
                self._told(arrival)
