"""Deferred admission: which prefixes were seen before. Pure.

As a file: magic ‖ xxh3_64 of what follows ‖ the first 8 bytes of every chain, oldest first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import xxhash

REMEMBERED: Final = 1 << 16
"""chains; the oldest are forgotten first"""
MAGIC: Final = b"kvd-seen-1\n"
MARK: Final = 8
"""bytes of a chain that are kept: two alike only mean that a block is written at its first use"""
_SUM: Final = 8


class Sightings:
    """A bounded memory of chains that were offered."""

    def __init__(self, size: int = REMEMBERED) -> None:
        self._size = size
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self.changed = False
        """There is something that its file does not say."""

    def __len__(self) -> int:
        return len(self._seen)

    def again(self, chain: bytes) -> bool:
        """True if the chain was offered before."""
        mark = chain[:MARK]
        if mark in self._seen:
            self._seen.move_to_end(mark)
            return True
        self._add(mark)
        self.changed = True
        return False

    def clear(self) -> None:
        self.changed = bool(self._seen)
        self._seen.clear()

    def pack(self) -> bytes:
        marks = b"".join(self._seen)
        return MAGIC + xxhash.xxh3_64_digest(marks) + marks

    def unpack(self, raw: bytes) -> None:
        """Remember what a file says was seen. Raises ValueError for one that is damaged or not ours."""
        marks = raw[len(MAGIC) + _SUM :]
        if raw[: -len(marks) or None] != MAGIC + xxhash.xxh3_64_digest(marks) or len(marks) % MARK:
            raise ValueError("not a list of what was seen")
        for at in range(0, len(marks), MARK):
            self._add(marks[at : at + MARK])

    def _add(self, mark: bytes) -> None:
        self._seen[mark] = None
        if len(self._seen) > self._size:
            self._seen.popitem(last=False)
