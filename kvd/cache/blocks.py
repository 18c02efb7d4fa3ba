"""The block allocator: who holds which block of the pool, what is known in it, and what gives way. Pure, no mlx.

A block is *live* (referenced by a sequence's block table), *cached* (known to the index, unreferenced, in the LRU) or
*free*. It may be *pinned* by readers of its bytes on other threads.

Invariants:
- rows below `sealed[block]` are known or being read: nobody writes them, whoever holds the block;
- a block with more than one reference is not written;
- only cached, unpinned blocks move or are evicted, so block tables of live sequences never change under them;
- a known block moves to a free block only, and the move is in `moves` before anything is written over its old place.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

from kvd.cache.chain import Chain
from kvd.cache.placement import Claims, Move, gaps, place, spare
from kvd.cache.prefix import Entry, PrefixIndex, make_entry
from kvd.cache.results import PoolFull


class BlockManager:
    """States of the blocks of one pool. Owned by the thread that owns the pool."""

    def __init__(self, index: PrefixIndex, blocks: int) -> None:
        self.index = index
        self.refs = [0] * blocks
        self.pins = [0] * blocks
        self.sealed = [0] * blocks
        self.entries: list[Entry | None] = [None] * blocks
        self.evictions: Counter[str] = Counter()
        self._free = set(range(blocks))
        self._lru: OrderedDict[Entry, None] = OrderedDict()
        self._pinned_cached = 0
        self.claims = Claims()
        self._moves: list[Move] = []

    # --- counts

    @property
    def total(self) -> int:
        return len(self.refs)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        """Known blocks that nobody holds or reads: they can be evicted."""
        return len(self._lru) - self._pinned_cached

    @property
    def available(self) -> int:
        return self.free + self.cached

    def largest_gap(self) -> int:
        """Length of the longest range of free blocks that no live sequence is expected to grow into."""
        return max((gap.length for gap in gaps(self._free - self.claims.others(None))), default=0)

    def grow(self, blocks: int) -> None:
        """The pool got larger: `blocks` is the new total."""
        more = blocks - self.total
        self._free.update(range(self.total, blocks))
        for column in (self.refs, self.pins, self.sealed):
            column.extend([0] * more)
        self.entries.extend([None] * more)

    def take_moves(self) -> list[Move]:
        """Copies to make now, in order. The caller makes them before it writes or reads any block."""
        moves, self._moves = self._moves, []
        return moves

    # --- references and pins

    def hold(self, block: int) -> None:
        """One more block table has it."""
        self.refs[block] += 1
        entry = self.entries[block]
        if self.refs[block] == 1 and entry is not None:
            del self._lru[entry]
            self._pinned_cached -= self.pins[block] > 0

    def release(self, block: int) -> None:
        """One table less. Callers release a sequence's last block first, so that tails are evicted before heads."""
        assert self.refs[block] > 0, block
        self.refs[block] -= 1
        if self.refs[block]:
            return
        if (entry := self.entries[block]) is not None:
            self._lru[entry] = None
            self._pinned_cached += self.pins[block] > 0
        else:
            self._settle(block)

    def pin(self, block: int) -> None:
        """A reader on another thread uses the rows below `sealed`."""
        self.pins[block] += 1
        if self.pins[block] == 1 and self.refs[block] == 0 and self.entries[block] is not None:
            self._pinned_cached += 1

    def unpin(self, block: int) -> None:
        assert self.pins[block] > 0, block
        self.pins[block] -= 1
        if self.pins[block]:
            return
        if self.entries[block] is None:
            self._settle(block)
        elif self.refs[block] == 0:
            self._pinned_cached -= 1

    # --- what is known

    def publish(
        self, block: int, namespace: bytes, parent: Chain, tokens: Sequence[int], start: int
    ) -> Entry | None:
        """Make the first `len(tokens)` rows of a held block known. None where a known block already holds them."""
        assert self.refs[block] > 0, block
        entry = make_entry(block, namespace, parent, tokens, start, self.index.block_size)
        added, superseded = self.index.add(entry)
        if not added:
            return None
        if superseded is not None:
            self._forget(superseded, "superseded", count=superseded.block != block)
        assert self.entries[block] is None, block
        self.entries[block] = entry
        self.sealed[block] = len(tokens)
        return entry

    def evict(self, entry: Entry, reason: str) -> None:
        """Forget a cached, unpinned block."""
        assert entry.block is not None and not self.refs[entry.block] and not self.pins[entry.block]
        self.index.remove(entry)
        self._forget(entry, reason)

    def clear(self, namespace: bytes | None = None) -> int:
        """Evict every cached block (of one namespace); returns how many."""
        gone = [e for e in self._evictable() if namespace is None or e.namespace == namespace]
        for entry in gone:
            self.evict(entry, "cleared")
        return len(gone)

    # --- allocation

    def obtain(self, owner: object, after: int | None, want: int) -> int:
        """A private block (one reference, nothing known in it) for a sequence that ends in block `after`.

        The next block in the pool where possible, else the start of a new run with room for `want` blocks.
        Raises PoolFull where every block is live or pinned.
        """
        if not self.available:
            raise PoolFull(1, 0)
        block = after + 1 if after is not None else None
        if block is None or block >= self.total or not self._usable(block):
            block = place(self._free, self._all_usable(), self.claims.others(owner), max(want, 1))
            assert block is not None
        self.claims.set(owner, range(block, min(block + max(want, 1), self.total)))
        self._vacate(block)
        self._free.discard(block)
        self.refs[block] = 1
        self.sealed[block] = 0
        return block

    def make_writable(self, owner: object, block: int, row: int, want: int) -> int:
        """The block a sequence that holds `block` may write from `row` on; rows below `row` are kept.

        Itself where it may; else what is known moves away, where nobody else uses it; else a copy (copy-on-write).
        """
        if self.writable(block, row):
            return block
        if self.refs[block] == 1 and not self.pins[block]:
            self._vacate(block)
            self.sealed[block] = 0
            return block
        copy = self.obtain(owner, None, want)
        if row:
            self._moves.append(Move(block, copy, row))
        self.release(block)
        return copy

    def writable(self, block: int, row: int) -> bool:
        """Whether the one sequence that holds `block` may write its rows from `row` on."""
        return self.refs[block] == 1 and row >= self.sealed[block]

    def needs_copy(self, block: int, row: int) -> bool:
        """Whether `make_writable` takes a block of its own."""
        return row < self.sealed[block] and self.pins[block] > 0 or self.refs[block] > 1

    def follows(self, block: int) -> bool:
        """Whether the next block in the pool could be had by who holds `block`."""
        return block + 1 < self.total and self._usable(block + 1)

    def room(self, owner: object, blocks: int) -> int | None:
        """The start of a gap that takes `blocks` blocks; None where there is none. It is claimed for `owner`."""
        start = place(self._free, self._all_usable(), self.claims.others(owner), blocks)
        if start is None or start + blocks > self.total or not all(map(self._usable, range(start, start + blocks))):
            return None
        self.claims.set(owner, range(start, start + blocks))
        return start

    def movable(self, block: int) -> bool:
        """Whether `relocate` may take a block from its place: one sequence holds it and nobody reads it."""
        return self.refs[block] == 1 and not self.pins[block]

    def relocate(self, block: int, target: int) -> bool:
        """Move a block that one sequence holds to `target`, where neither is in anybody's way; False otherwise.

        Evicts one block at most, where nothing is free: `block` itself is free afterwards.
        """
        if not self.movable(block) or not 0 <= target < self.total or not self._usable(target):
            return False
        if not self._free:
            self.evict(next(self._evictable()), "capacity")
        self._vacate(target)
        entry = self.entries[block]
        self._free.discard(target)
        self._moves.append(Move(block, target, self.index.block_size))
        self.refs[target], self.refs[block] = 1, 0
        self.sealed[target], self.sealed[block] = self.sealed[block], 0
        self.entries[target], self.entries[block] = entry, None
        if entry is not None:
            entry.block = target
        self._free.add(block)
        return True

    # --- inside

    def _trail(self, block: int) -> int:
        """Blocks from `block` on that hold one chain nobody uses: likely to be moved one after another."""
        length, entry = 1, self.entries[block]
        while block + length < self.total and self._usable(block + length):
            following = self.entries[block + length]
            if entry is None or following is None or following.parent != entry.chain:
                break
            length, entry = length + 1, following
        return length

    def _usable(self, block: int) -> bool:
        return not self.refs[block] and not self.pins[block]

    def _all_usable(self) -> set[int]:
        return self._free.union(e.block for e in self._evictable() if e.block is not None)

    def _evictable(self) -> Iterator[Entry]:
        """Known blocks that nobody holds or reads, least recently used first."""
        return (e for e in self._lru if e.block is not None and not self.pins[e.block])

    def _vacate(self, block: int) -> None:
        """Nothing is known in `block` afterwards: its entry moves to a free block, or goes as the LRU's next victim."""
        entry = self.entries[block]
        if entry is None:
            return
        parent = self.index.get(entry.parent)
        follow = parent.block if parent is not None else None
        target = spare(self._free, self.claims.others(None), block, follow, self._trail(block))
        if target is None:
            victim = next(self._evictable(), None)
            if victim is entry or victim is None:
                self.index.remove(entry)
                self._forget(entry, "capacity" if victim is entry else "in_place")
                return
            target = victim.block
            assert target is not None
            self.evict(victim, "capacity")
        self._move(entry, block, target)

    def _move(self, entry: Entry, block: int, target: int) -> None:
        self._free.discard(target)
        self._moves.append(Move(block, target, len(entry.tokens)))
        self.entries[target], self.entries[block] = entry, None
        self.sealed[target], self.sealed[block] = len(entry.tokens), 0
        entry.block = target
        if self.refs[block]:
            self._lru[entry] = None
        else:
            self._free.add(block)

    def _forget(self, entry: Entry, reason: str, count: bool = True) -> None:
        """The index no longer has `entry`: its block is free, or private to whoever holds it."""
        block = entry.block
        assert block is not None and self.entries[block] is entry
        entry.block, self.entries[block] = None, None
        self.evictions[reason] += count
        if not self.refs[block]:
            del self._lru[entry]
            self._pinned_cached -= self.pins[block] > 0
        if not self.pins[block]:
            self.sealed[block] = 0
        self._settle(block)

    def _settle(self, block: int) -> None:
        """Free a block that nobody holds, reads or knows."""
        if not self.refs[block] and not self.pins[block] and self.entries[block] is None:
            self.sealed[block] = 0
            self._free.add(block)
