"""Values that the store takes and gives. Plain and frozen: they cross threads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from kvd.messages import CommittedItem, Entry, Offer, Written

__all__ = [
    "CommittedItem", "Entry", "Found", "Limits", "Node", "Offer", "Refusal", "Report", "Reservation", "Written",
    "disk_bytes",
]

PAGE = 4096
STORED = frozenset({"exists", "covered"})
"""Refusals that mean: these tokens are durable already."""
FIRST_USE: Final = "first_use"
"""The refusal that means: noted, and taken when another use offers it."""


def disk_bytes(size: int) -> int:
    """What a file of `size` bytes takes of a disk, as `du` counts, plus a page for the file system's own use."""
    return -(-size // PAGE) * PAGE + PAGE


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings of a store; sizes in bytes, 0 meaning none."""

    limit: int
    """0: the store is off. Nothing is read or written, and what is there stays until somebody clears it"""
    free_space: int = 0
    """bytes of the volume left to others"""
    durable: bool = True
    admission: Literal["first", "second"] = "first"
    quota: int = 0
    """per model: all its namespaces together"""
    tbw: int = 0
    """bytes the drive's maker says can be written to it in its life"""

    @property
    def off(self) -> bool:
        return self.limit == 0


@dataclass(frozen=True, slots=True)
class Found:
    """What of a prompt is stored: `hits` follow each other from the asked start; the first `child_rows` tokens behind
    them are the first of `child`, whose next one is `child_token` (None where it has no more)."""

    hits: tuple[Entry, ...] = ()
    child: Entry | None = None
    child_rows: int = 0
    child_token: int | None = None


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room for the shard of a block. Write to `temp`, fsync if `durable`, rename to `final`, say `Written`."""

    id: int
    offer: Offer
    temp: str
    final: str
    durable: bool = True


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nothing may be written; `reason` is a counter's name. `stored`: because the tokens are durable already."""

    reason: str

    @property
    def stored(self) -> bool:
        return self.reason in STORED


@dataclass(frozen=True, slots=True)
class Node:
    """A stretch of blocks without a branch or the end of a pin, as `ls` shows it. Counts are of it alone, times in s.

    A list of them is a tree, written down line by line: parents before children, without nesting, since a conversation
    may branch at every turn and messages may not be nested that deep."""

    namespace: str
    model: str
    chain: str
    """of its last block"""
    preview: str
    """its first words"""
    start: int
    tokens: int
    blocks: int
    bytes: int
    hits: int
    last_use: float
    pinned: bool
    expires: float | None
    depth: int
    """branches above it"""
    parent: str
    """chain of the stretch that it continues; empty at the top"""
    words: str = ""
    """the first that its siblings do not have in common with it; empty: it has no siblings, or none differ"""


@dataclass(frozen=True, slots=True)
class Report:
    """What a round of upkeep did: blocks looked at, bytes given back, counts by reason."""

    checked: int = 0
    freed: int = 0
    counts: dict[str, int] = field(default_factory=dict)
