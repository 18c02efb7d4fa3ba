"""A private block that waits for its bytes from the store."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from kvd.cache.chain import Chain, next_chain
from kvd.cache.hostmem import ALL_PARTS, Opened
from kvd.cache.pool import KVPool
from kvd.cache.results import Published

if TYPE_CHECKING:
    from kvd.cache.sequence import CachedSequence


class BlockLanding:
    """Fill what `writing(rows)` opens on any thread, then `accept` or `reject` on the mlx thread, once.

    The sequence waits for its landings in order; one that it no longer waits for publishes all the same.
    """

    def __init__(self, sequence: CachedSequence, index: int, block: int, before: BlockLanding | None) -> None:
        self.index = index
        """position in the sequence, in blocks"""
        self.block = block
        self.chain: Chain | None = None
        self.tokens: tuple[int, ...] | None = None
        """set when accepted"""
        self.used = 0
        self.rejected = False
        self._cache = sequence.cache
        self._sequence = sequence
        self._before = before
        self._parent = sequence.chain if before is None else None
        self._cache.manager.hold(block)
        pool = self._cache.pool
        target = InPlaceTarget if pool.host_addressable or pool.copier is not None else StagedTarget
        self._target = target(self._cache.pool, block)

    @property
    def staged(self) -> bool:
        """Whether bytes in the buffers still have to be brought into the pool."""
        return isinstance(self._target, StagedTarget)

    @property
    def usable(self) -> bool:
        """Whether passes may read settled parts in the pool: it has not grown since, or the bytes are staged."""
        return self._target.usable

    def writing(self, rows: int | None = None, parts: slice = ALL_PARTS) -> Opened:
        """Windows for a block of `rows` rows (default: full), part by part, head by head, as in its shard. What is in
        them when the context is left without an error counts."""
        return self._target.writing(self._cache.block_size if rows is None else rows, parts)

    def settle(self, rows: int, parts: slice) -> None:
        """These parts of `rows` rows are in the buffers: bring them into the pool now, ahead of `accept`."""
        self._cache.assert_owner()
        self._target.settle(rows, parts)

    def accept(
        self, tokens: Sequence[int], chain: bytes, parent: bytes | None = None, used: int | None = None,
        *, overwritten: bool = False,
    ) -> Published | None:
        """The buffers hold the KV of `tokens`, whose chain is `chain`: publish the block.

        parent: chain of the block before it; may be left out for the first landing and behind an accepted one.
        used: leading rows that the sequence itself takes (a child that diverges from the prompt); default all.
        overwritten: the sequence has put other rows behind the `used` ones already: nothing is published.
        Returns what became known, or None where the same was known already. ValueError: the chain is not that of
        these tokens; the landing then counts as rejected.
        """  # fmt: skip
        self._cache.assert_owner()
        origin = parent if parent is not None else self._known_parent()
        if origin is None or next_chain(origin, tokens) != chain:
            self.reject()
            raise ValueError("the chain does not follow from the parent and the tokens")
        self._target.complete(len(tokens))
        self.chain, self.tokens = Chain(bytes(chain)), tuple(tokens)
        self.used = len(tokens) if used is None else min(used, len(tokens))
        published = None
        if not overwritten:
            start = self.index * self._cache.block_size
            published = self._sequence.publish_block(self.block, Chain(bytes(origin)), self.tokens, start)
        self._finish()
        return published

    def reject(self) -> None:
        """The bytes did not come: this block and everything behind it is a miss for the sequence."""
        self._cache.assert_owner()
        self.rejected = True
        self._target.spoil()
        self._finish()

    def leave(self) -> None:
        """As `reject` for the sequence, while somebody may still fill what `writing` opened: the block and its buffers
        are nobody else's until `reject`."""
        self._cache.assert_owner()
        self.rejected = True
        self._sequence.landed()

    def _finish(self) -> None:
        self._target.drop()
        self._sequence.landed()
        self._cache.manager.release(self.block)

    def _known_parent(self) -> Chain | None:
        return self._parent if self._before is None else self._before.chain


class InPlaceTarget:
    """The pool's own rows: windows on them, or copies to them by the device."""

    def __init__(self, pool: KVPool, block: int) -> None:
        self._pool, self._block = pool, block
        self._generation = pool.acquire()

    @property
    def usable(self) -> bool:
        return self._pool.current(self._generation)

    def writing(self, rows: int, parts: slice) -> Opened:
        return self._pool.writing(self._generation, self._block, rows, parts)

    def settle(self, rows: int, parts: slice) -> None:
        """They are where they belong."""

    def complete(self, rows: int) -> None:
        self._pool.carry_over(self._generation, self._block, rows)

    def spoil(self) -> None:
        self._pool.zero(self._block)

    def drop(self) -> None:
        self._generation.drop()


class StagedTarget:
    """Host buffers of its own, copied into the pool when accepted: for devices whose memory the host cannot address."""

    def __init__(self, pool: KVPool, block: int) -> None:
        self._pool, self._block = pool, block
        self._staging = pool.staging()
        self._settled: set[int] = set()

    @property
    def usable(self) -> bool:
        return True

    def writing(self, rows: int, parts: slice) -> Opened:
        return nullcontext(self._pool.staged_windows(self._staging, rows, parts))

    def settle(self, rows: int, parts: slice) -> None:
        self._pool.put(self._block, self._staging.arrays, rows, parts)
        self._settled.update(range(*parts.indices(len(self._pool.parts))))

    def complete(self, rows: int) -> None:
        if not self._settled:
            self.settle(rows, ALL_PARTS)
        assert len(self._settled) == len(self._pool.parts), "some parts were settled, not all"

    def spoil(self) -> None:
        pass

    def drop(self) -> None:
        self._pool.reuse(self._staging)
