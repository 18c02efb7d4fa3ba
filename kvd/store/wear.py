"""Bytes written to the drive: today, in total, and the share of its endurance per year. Pure but for its text form."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

DAY_S: Final = 86400.0
YEAR_S: Final = 365.25 * DAY_S


class Wear:
    """Shard bytes; what the index and the file system add is not counted. `day` changes at UTC midnight."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.total = 0
        self.since = clock()
        self._day = self._today()
        self._written_today = 0

    @property
    def today(self) -> int:
        return self._written_today if self._day == self._today() else 0

    def add(self, nbytes: int) -> None:
        self._written_today = self.today + nbytes
        self._day = self._today()
        self.total += nbytes

    def per_year(self) -> float:
        """Bytes per year at the rate so far (a store younger than a day counts as a day old)."""
        return self.total / max(self._clock() - self.since, DAY_S) * YEAR_S

    def endurance_per_year(self, tbw: int) -> float | None:
        """Share (0 … 1 and over) of the drive's stated endurance used per year; None when it is not known."""
        return self.per_year() / tbw if tbw else None

    def pack(self) -> bytes:
        return f"{self.total} {self.since!r} {self._day} {self.today}".encode()

    def unpack(self, raw: bytes | None) -> None:
        """Take over counts from the text form unless ours are higher; garbage changes nothing."""
        try:
            total, since, day, today = (raw or b"").decode().split()
            found = int(total), float(since), int(day), int(today)
        except ValueError:
            return
        if found[0] > self.total:
            self.total, self.since, self._day, self._written_today = found

    def _today(self) -> int:
        return int(self._clock() // DAY_S)
