"""Where in the pool a sequence goes: gaps of blocks, chosen so that it stays one run. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Move:
    """Copy the first `rows` rows of block `src` to block `dst`, in the order of the list, before any write."""

    src: int
    dst: int
    rows: int


class Claims:
    """Blocks that live sequences are expected to grow into: others are placed elsewhere while there is room."""

    def __init__(self) -> None:
        self._claims: dict[object, range] = {}

    def set(self, owner: object, blocks: range) -> None:
        self._claims[owner] = blocks

    def drop(self, owner: object) -> None:
        self._claims.pop(owner, None)

    def others(self, owner: object | None) -> frozenset[int]:
        """What anybody but `owner` has claimed."""
        return frozenset(block for who, blocks in self._claims.items() if who is not owner for block in blocks)


@dataclass(frozen=True, slots=True)
class Gap:
    """Adjacent blocks [start, start + length)."""

    start: int
    length: int

    @property
    def last(self) -> int:
        return self.start + self.length - 1


def gaps(blocks: Iterable[int]) -> list[Gap]:
    """Maximal ranges of adjacent ids."""
    found: list[Gap] = []
    start = previous = None
    for block in sorted(blocks):
        if previous is None or start is None or block != previous + 1:
            if start is not None and previous is not None:
                found.append(Gap(start, previous - start + 1))
            start = block
        previous = block
    if start is not None and previous is not None:
        found.append(Gap(start, previous - start + 1))
    return found


def place(free: Collection[int], usable: Collection[int], claimed: Collection[int], want: int) -> int | None:
    """First block for a new run of `want` blocks; None where nothing is usable.

    The largest gap of free blocks that takes the whole run leaves it most room to grow beyond what is expected;
    else the largest gap that cached blocks would make room in (they move or go). Blocks that live sequences are
    expected to grow into (`claimed`) are left alone while anything else is there.
    """
    for blocks, least in (
        ([b for b in free if b not in claimed], want),
        ([b for b in usable if b not in claimed], want),
        ([b for b in usable if b not in claimed], 1),
        (usable, 1),
    ):
        largest = max(gaps(blocks), key=lambda gap: gap.length, default=None)
        if largest is not None and largest.length >= least:
            return largest.start
    return None


def spare(free: Collection[int], claimed: Collection[int], avoid: int, follow: int | None, length: int) -> int | None:
    """A free block to move a known one to, so that a chain that moves block by block stays one run.

    Behind its parent (block `follow`) where that is free; else at the end of the smallest gap that takes the `length`
    blocks which will follow it; blocks that live sequences are expected to grow into only where nothing else is free.
    """
    candidates = [b for b in free if b not in claimed and b != avoid]
    if follow is not None and follow + 1 in free and follow + 1 not in claimed and follow + 1 != avoid:
        return follow + 1
    for blocks in (candidates, [b for b in free if b != avoid]):
        found = gaps(blocks)
        fitting = min((gap for gap in found if gap.length >= length), key=lambda gap: gap.length, default=None)
        if fitting is not None:
            return fitting.last - length + 1
        if found:
            return max(found, key=lambda gap: gap.length).start
    return None
