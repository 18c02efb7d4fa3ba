"""The byte ledger: reserve, then commit or abort. Pure.

    used = shards + reserved + other + headroom <= limit      at every moment

`other` is measured, not promised: index, folders, small files, quarantine, orphans, foreign files. `headroom` is what
the index may grow by before it is measured again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

HEADROOM: Final = 512 * 1024
"""bytes, at least: pages LMDB copies on write in the next transactions (see `index.BATCH`)"""
HEADROOM_SHARE: Final = 256
"""The headroom is 1/256 of a large limit, up to HEADROOM_MOST."""
HEADROOM_MOST: Final = 16 * 1024 * 1024
INDEX_PER_BLOCK: Final = 16 * 1024
"""bytes of index a pending block may need: its row, its token ids, its keys among siblings"""


@dataclass(frozen=True, slots=True)
class Usage:
    """bytes"""

    limit: int
    shards: int
    reserved: int
    other: int
    headroom: int

    @property
    def used(self) -> int:
        return self.shards + self.reserved + self.other + self.headroom

    @property
    def room(self) -> int:
        """May be negative: then so much must go."""
        return self.limit - self.used

    @property
    def over(self) -> int:
        """Bytes over the limit with half of the headroom left: then even pins must go."""
        return self.used - self.headroom // 2 - self.limit


class Ledger:
    """Bytes of the store against its limit. What holds at every moment (see the module) may be broken by a lower limit
    or a new measure of `other` alone, until room is made again."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.shards = 0
        self.other = 0
        self.reserved = 0
        self._reserved: dict[int, int] = {}

    def usage(self) -> Usage:
        pending = len(self._reserved)
        headroom = min(max(HEADROOM, self.limit // HEADROOM_SHARE), HEADROOM_MOST)
        return Usage(self.limit, self.shards, self.reserved, self.other, headroom + pending * INDEX_PER_BLOCK)

    def missing(self, nbytes: int) -> int:
        """Bytes that must go before `nbytes` (one more block) can be reserved; 0 or less: there is room."""
        return nbytes + INDEX_PER_BLOCK - self.usage().room

    def reserve(self, reservation: int, nbytes: int) -> None:
        """Raises ValueError if there is no room: ask `missing` first."""
        if self.missing(nbytes) > 0:
            raise ValueError(f"{nbytes} bytes reserved with {self.usage().room} free")
        self._reserved[reservation] = nbytes
        self.reserved += nbytes

    def settle(self, reservation: int, nbytes: int) -> None:
        """The reservation became a shard of `nbytes` on disk (0: it was given up)."""
        self.reserved -= self._reserved.pop(reservation)
        self.shards += nbytes
