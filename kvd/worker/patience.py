"""How long a pass may wait for rows that are still being read, while the thread that owns MLX does nothing else, and
how long a request may, while that thread serves others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

STILL_S: Final = 5.0
"""seconds that the engine may sit still in one pass while nobody wants it"""
WANTED_S: Final = 0.25
"""seconds that whoever wants it meanwhile is kept waiting"""
HUNG_S: Final = 30.0
"""seconds after which a read that has not come back is given up. Drives that sleep are there in 10 to 20, Linux takes a
command of a drive (SCSI, NVMe) for lost after 30, and the few MB of a read take as long only below some 0.1 MB/s"""


class Patience:
    """Any thread may say that the engine is wanted; the engine's asks how long it may still wait."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.news = threading.Condition()
        """notified when the engine is wanted; arrivals notify it of their pieces"""
        self._clock = clock
        self._wanted_at: float | None = None
        self._until = 0.0

    def now(self) -> float:
        return self._clock()

    def wanted(self) -> None:
        """Somebody has something for the engine to do."""
        with self.news:
            if self._wanted_at is None:
                self._wanted_at = self._clock()
                self.news.notify_all()

    def heard(self) -> None:
        """The engine is about to do what it was wanted for so far."""
        self._wanted_at = None

    def begin(self, due_s: float | None) -> None:
        """A pass begins. due_s: seconds until something is due in any case."""
        self._until = self._clock() + min(STILL_S, STILL_S if due_s is None else due_s)

    def left(self) -> float:
        """Seconds that the pass may still wait; none are left at 0 or below."""
        wanted = self._wanted_at
        until = self._until if wanted is None else min(self._until, wanted + WANTED_S)
        return until - self._clock()
