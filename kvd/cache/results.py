"""What crosses the border between the cache and the engine: results of lookups and blocks to be stored. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from kvd.cache.chain import Chain

if TYPE_CHECKING:
    from kvd.cache.prefix import Entry


class Consent(Enum):
    """May the pool grow? SOON: not yet, memory is being made free for it."""

    YES = "yes"
    NO = "no"
    SOON = "soon"


class PoolFull(Exception):
    """No block can be had: everything is live or pinned. Nothing was changed. `soon`: the pool may be allowed to grow
    in a moment, waiting helps."""

    def __init__(self, needed: int, free: int, soon: bool = False) -> None:
        super().__init__(f"the KV pool needs {needed} blocks, {free} can be had")
        self.needed = needed
        self.free = free
        self.soon = soon


@dataclass(frozen=True, slots=True)
class Published:
    """A block (or the partial tail) that became known: what the store needs to keep it.

    `tokens` are the rows [start, start + len(tokens)) of the sequence; `block` is its index in the pool.
    """

    block: int
    namespace: bytes
    chain: Chain
    parent: Chain
    tokens: tuple[int, ...]
    start: int
    entry: Entry = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Match:
    """What memory holds of a prompt: full blocks, then some rows of the best child.

    rows: leading tokens whose KV is there. stored_token: what the best child has at position `rows` where it goes on
    differently (None: nothing diverges, the stored tokens just end).
    """

    namespace: bytes
    block_size: int
    rows: int
    blocks: tuple[Entry, ...]
    child: Entry | None
    stored_token: int | None

    @property
    def child_rows(self) -> int:
        return self.rows - len(self.blocks) * self.block_size if self.child else 0

    @property
    def chain(self) -> Chain:
        """Chain of the last full block, or the namespace: the parent of whatever comes next."""
        return self.blocks[-1].chain if self.blocks else Chain(self.namespace)

    def full_blocks(self) -> Match:
        """The same without the partial child: for going on with blocks restored from the store."""
        return Match(self.namespace, self.block_size, len(self.blocks) * self.block_size, self.blocks, None, None)


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts of blocks and bytes of one pool. total = free + cached + live (pinned ones count as live)."""

    block_size: int
    blocks_total: int
    blocks_limit: int
    blocks_free: int
    blocks_cached: int
    blocks_live: int
    sequences: int
    bytes_pool: int
    bytes_live: int
    bytes_per_token: int
    evictions: dict[str, int]
    """by reason: capacity (the LRU gave way), superseded (a longer block contains it), in_place (no room to move it),
    cleared (asked for)"""
