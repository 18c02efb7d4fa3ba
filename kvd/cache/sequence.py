"""One sequence over the pool: its tokens, its block table and the rows that are valid. Owned by the mlx thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvd.cache.chain import Chain, next_chain
from kvd.cache.landing import BlockLanding
from kvd.cache.prefix import Entry
from kvd.cache.results import Match, Published

if TYPE_CHECKING:
    from kvd.cache.paged import PagedCache

STRAIGHTENED = 16
"""Blocks that are moved at most to make one run of a hit (5 ms each on the CPU): one that is more scattered attends
piece by piece."""


class CachedSequence:
    """rows: tokens whose KV is stored. tokens: their ids. Open one with `PagedCache.open`, close it when done.

    Order of use: `reserve(n)`, a forward pass over n tokens, `advance(those tokens)`.
    """

    def __init__(self, cache: PagedCache, namespace: bytes, expected_rows: int) -> None:
        self.cache = cache
        self.namespace = namespace
        self.expected_rows = expected_rows
        self.rows = 0
        self.tokens: list[int] = []
        self.closed = False
        self._table: list[int] = []
        self._chains: list[Chain] = []
        self._landings: list[BlockLanding] = []
        self._runs: list[tuple[int, int]] | None = None

    # --- reading

    @property
    def block_table(self) -> tuple[int, ...]:
        """Blocks in order; reserved ones behind the last valid row included."""
        return tuple(self._table)

    @property
    def chain(self) -> Chain:
        """Chain of the last full block, or the namespace: the parent of what comes next."""
        return self._chains[-1] if self._chains else Chain(self.namespace)

    def runs(self) -> list[tuple[int, int]]:
        """(first row in the pool, blocks) of each range of adjacent blocks, in order."""
        if self._runs is None:
            found: list[tuple[int, int]] = []
            size = self.cache.block_size
            for block in self._table:
                if found and found[-1][0] + found[-1][1] * size == block * size:
                    found[-1] = (found[-1][0], found[-1][1] + 1)
                else:
                    found.append((block * size, 1))
            self._runs = found
        return self._runs

    @property
    def spare(self) -> int:
        """Rows that `reserve` gives without moving, copying or growing anything."""
        at, inside = divmod(self.rows, self.cache.block_size)
        if inside and not self.cache.manager.writable(self._table[at], inside):
            return 0
        return (self._landings[0].index if self._landings else len(self._table)) * self.cache.block_size - self.rows

    # --- growing

    def reserve(self, n: int) -> None:
        """Capacity for n further rows, private to this sequence; no more than there is room for before landings. Raises
        PoolFull; then nothing has changed."""
        self.cache.assert_owner()
        if n <= self.spare:
            return
        manager, size = self.cache.manager, self.cache.block_size
        assert not self.closed and (not self._landings or self.rows + n <= self._landings[0].index * size)
        at, inside = divmod(self.rows, size)
        more = max(0, -(-(self.rows + n) // size) - len(self._table))
        ready = not inside or manager.writable(self._table[at], inside)
        copy = not ready and manager.needs_copy(self._table[at], inside)
        self.cache.make_room(more + copy, 0 if self._table else self._wanted())
        if not ready:
            self._table[at] = manager.make_writable(self, self._table[at], inside, self._wanted())
        self._obtain(more)
        self.cache.run_moves()

    def advance(self, tokens: Sequence[int]) -> list[Published]:
        """The forward pass wrote these tokens' rows. Returns the blocks that became known by it, in order."""
        self.cache.assert_owner()
        size = self.cache.block_size
        assert self.rows + len(tokens) <= len(self._table) * size, "advance beyond what was reserved"
        self.tokens.extend(tokens)
        self.rows += len(tokens)
        published: list[Published] = []
        while (len(self._chains) + 1) * size <= self.rows:
            index = len(self._chains)
            part = self.tokens[index * size : (index + 1) * size]
            parent = self.chain
            done = self.publish_block(self._table[index], parent, part, index * size)
            if done is not None:
                published.append(done)
            self._chains.append(next_chain(parent, part))
        return published

    def tail(self) -> Published | None:
        """Make the partial block at the end known. None where there is none or its rows are known already."""
        self.cache.assert_owner()
        size = self.cache.block_size
        at, inside = divmod(self.rows, size)
        if not inside or self.cache.manager.sealed[self._table[at]] >= inside:
            return None
        return self.publish_block(self._table[at], self.chain, self.tokens[at * size :], at * size)

    def publish_block(self, block: int, parent: Chain, tokens: Sequence[int], start: int) -> Published | None:
        entry = self.cache.manager.publish(block, self.namespace, parent, tokens, start)
        if entry is None:
            return None
        return Published(block, self.namespace, entry.chain, parent, entry.tokens, start, entry)

    # --- sharing

    def adopt(self, match: Match) -> None:
        """Take references on a match's blocks; stops at one that has gone since the lookup."""
        for entry in match.blocks:
            if not self._take(entry, self.cache.block_size):
                break
            self._chains.append(entry.chain)
        else:
            if match.child is not None:
                self._take(match.child, match.child_rows)
        self._straighten()

    def fork(self) -> CachedSequence:
        """A twin that shares every block; whoever writes first into the shared tail gets a copy of it."""
        self.cache.assert_owner()
        assert not self._landings
        twin = CachedSequence(self.cache, self.namespace, self.expected_rows)
        twin.rows, twin.tokens, twin._chains = self.rows, list(self.tokens), list(self._chains)
        for block in self._table[: -(-self.rows // self.cache.block_size)]:
            self.cache.manager.hold(block)
            twin._table.append(block)
        self.cache.sequences.add(twin)
        return twin

    # --- shrinking

    def truncate(self, rows: int) -> None:
        """Forget the rows from `rows` on; blocks that are known stay cached."""
        self.cache.assert_owner()
        assert 0 <= rows <= self.rows and not self._landings
        size = self.cache.block_size
        for block in reversed(self._table[-(-rows // size) :]):
            self.cache.manager.release(block)
        del self._table[-(-rows // size) :], self.tokens[rows:], self._chains[rows // size :]
        self.rows, self._runs = rows, None

    def close(self) -> None:
        """Release every block, tail first. Known blocks stay cached. A second call does nothing."""
        self.cache.assert_owner()
        if self.closed:
            return
        self.closed = True
        self._landings = []
        for block in reversed(self._table):
            self.cache.manager.release(block)
        self._table, self._runs = [], None
        self.cache.manager.claims.drop(self)
        self.cache.sequences.discard(self)

    # --- restoring from the store

    def landing(self, blocks: int, behind: int = 0) -> list[BlockLanding]:
        """Private blocks for `blocks` blocks of the prompt, to be filled from the store, in order, behind private room
        for the next `behind`, which are computed before any landing is decided.
        Needs `rows` at a block border. Rows become valid as landings are accepted in sequence; a rejected one, and
        everything behind it, is a miss. Raises PoolFull; then nothing has changed.
        """
        self.cache.assert_owner()
        size = self.cache.block_size
        assert self.rows % size == 0 and not self._landings and not self.closed
        self._cut(self.rows // size)
        self.lengthen(behind + blocks)
        for index in range(self.rows // size + behind, len(self._table)):
            before = self._landings[-1] if self._landings else None
            self._landings.append(BlockLanding(self, index, self._table[index], before))
        return list(self._landings)

    def lengthen(self, blocks: int) -> None:
        """Private blocks behind those in the table, whatever is in them. Raises PoolFull; then nothing has changed."""
        self.cache.make_room(blocks, 0 if self._table else self._wanted())
        self._obtain(blocks)
        self.cache.run_moves()

    def landed(self) -> None:
        """A landing was decided: take the rows of those accepted in sequence; cut what lies behind a rejected one."""
        while self._landings and self._landings[0].tokens is not None:
            done = self._landings.pop(0)
            assert done.tokens is not None and done.chain is not None
            self.tokens.extend(done.tokens[: done.used])
            self.rows += done.used
            if done.used < self.cache.block_size:
                if self._landings or not done.used:
                    self._landings = []
                    self._cut(-(-self.rows // self.cache.block_size))
                return
            self._chains.append(done.chain)
        if self._landings and self._landings[0].rejected:
            self._landings = []
            self._cut(len(self._chains))

    # --- inside

    def _wanted(self) -> int:
        """Blocks this sequence is still expected to need."""
        return max(1, -(-self.expected_rows // self.cache.block_size) - len(self._table))

    def _obtain(self, blocks: int) -> None:
        for _ in range(blocks):
            after = self._table[-1] if self._table else None
            if after is not None and not self.cache.manager.follows(after) and len(self.runs()) == 1:
                self._move_house(self._wanted())
                after = self._table[-1]
            self._table.append(self.cache.manager.obtain(self, after, self._wanted()))
        self._runs = None

    def _straighten(self) -> None:
        """Make one run of what was taken, as far as nobody else uses it: the rest moves next to the longest run."""
        runs, size = self.runs(), self.cache.block_size
        start, length = max(runs, key=lambda run: run[1], default=(0, 0))
        if len(runs) < 2 or len(self._table) - length > STRAIGHTENED:
            return
        anchor = self._table.index(start // size)
        for at in range(anchor + length, len(self._table)):
            if not self._relocated(at, self._table[at - 1] + 1):
                break
        for at in range(anchor - 1, -1, -1):
            if not self._relocated(at, self._table[at + 1] - 1):
                break
        if len(self.runs()) > 1:
            self._move_house(0)
        self.cache.run_moves()

    def _move_house(self, more: int) -> None:
        """Take all blocks to a gap with room for them and `more`, if they are few and nobody else uses them."""
        manager, count = self.cache.manager, len(self._table)
        if count > STRAIGHTENED or not all(map(manager.movable, self._table)):
            return
        start = manager.room(self, count + more)
        if start is None:
            start = manager.room(self, count + min(more, 1))
        if start is not None:
            for at in range(count):
                moved = self._relocated(at, start + at)
                assert moved, "the gap was not free"

    def _relocated(self, at: int, target: int) -> bool:
        manager = self.cache.manager
        if self._table[at] == target:
            return True
        if target in self._table:  # one of its own is in the way, whose turn comes later
            aside = manager.room(self, 1)
            if aside is None or not self._relocated(self._table.index(target), aside):
                return False
        if not manager.relocate(self._table[at], target):
            return False
        self._table[at], self._runs = target, None
        return True

    def _take(self, entry: Entry, rows: int) -> bool:
        if entry.block is None:
            return False
        self.cache.manager.hold(entry.block)
        self._table.append(entry.block)
        self.tokens.extend(entry.tokens[:rows])
        self.rows += rows
        self._runs = None
        return True

    def _cut(self, blocks: int) -> None:
        """Keep the first `blocks` blocks of the table."""
        for block in reversed(self._table[blocks:]):
            self.cache.manager.release(block)
        size = self.cache.block_size
        del self._table[blocks:], self._chains[blocks:]
        self.rows = min(self.rows, blocks * size)
        del self.tokens[self.rows :]
        self._runs = None
