"""The facade of the cache: what the engine programs against.

    match = cache.match(tokens, namespace)
    sequence = cache.open(tokens, match, namespace, expected_rows)
    sequence.reserve(n); logits = forward(model, cache, [(sequence, next_tokens)]); sequence.advance(next_tokens)
    for published in …: handle = cache.host_rows(published)      # to the writer thread
    sequence.close()

One thread owns it (asserted); only `HostBlock` handles and a landing's buffers may be used by others.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from kvd.cache.blocks import BlockManager
from kvd.cache.forward import forward
from kvd.cache.hostmem import HostBlock, on_cpu
from kvd.cache.kernel import Tables
from kvd.cache.landing import BlockLanding
from kvd.cache.layout import KVLayout
from kvd.cache.paths import preferences
from kvd.cache.plugin import LayerCache, OpaqueLayerCache, Step, install_hook
from kvd.cache.pool import KVPool
from kvd.cache.prefix import PrefixIndex
from kvd.cache.results import CacheStats, Consent, Match, PoolFull, Published
from kvd.cache.sequence import CachedSequence

__all__ = [
    "BlockLanding", "CacheStats", "CachedSequence", "HostBlock", "KVLayout", "Match", "PagedCache", "PoolFull",
    "Published", "forward",
]


class PagedCache:
    """The memory tier of one model: pool, allocator and prefix index."""

    def __init__(
        self,
        layout: KVLayout,
        block_size: int,
        max_blocks: int,
        *,
        initial_blocks: int,
        namespace: bytes,
        on_bytes: Callable[[int, bool], Consent] = lambda nbytes, needed: Consent.YES,
    ) -> None:
        """on_bytes(n, needed) is asked before the pool takes n bytes more; `needed`: nothing else gives room to what is
        live. A negative n is given back."""
        self.layout = layout
        self.block_size = block_size
        self.max_blocks = max(max_blocks, 1)
        self.namespace = namespace
        self.index = PrefixIndex(block_size)
        first = min(max(initial_blocks, 1), self.max_blocks)
        self.manager = BlockManager(self.index, first)
        self.pool = KVPool(layout, block_size, first)
        install_hook()
        self.sequences: set[CachedSequence] = set()
        layers = range(len(layout.layers))
        self._plain = [LayerCache(self.pool, layer) for layer in layers]
        self._opaque: list[LayerCache] = [OpaqueLayerCache(self.pool, layer) for layer in layers]
        self.paths = preferences(layout.dtype, block_size, on_cpu())
        """which attention paths are used; `kvd.cache.check` at load takes out those that do not work"""
        self.tables: Tables | None = None
        """block tables of the last decode step that needed them on the device"""
        self._on_bytes = on_bytes
        self._allowed = self.pool.nbytes
        self._owner = threading.get_ident()
        self._released: deque[int] = deque()

    def assert_owner(self) -> None:
        assert threading.get_ident() == self._owner, "the cache is used from a thread that does not own it"

    # --- lookups and sequences

    def match(self, tokens: Sequence[int], namespace: bytes | None = None) -> Match:
        """What memory holds of `tokens`: full blocks, then the best child's rows. Changes nothing."""
        self.assert_owner()
        return self.index.match(self.namespace if namespace is None else namespace, tokens)

    def open(
        self, tokens: Sequence[int], match: Match | None, namespace: bytes | None = None, expected_rows: int = 0
    ) -> CachedSequence:
        """A sequence that starts with the match's rows (fewer where blocks have gone since: look at `rows`).

        expected_rows: prompt and answer together, for placement only; exceeding it is fine.
        """
        self.assert_owner()
        space = self.namespace if namespace is None else namespace
        sequence = CachedSequence(self, space, max(expected_rows, len(tokens)))
        self.sequences.add(sequence)
        if match is not None:
            assert match.namespace == space
            sequence.adopt(match)
        return sequence

    # --- bytes for other threads

    def host_rows(self, published: Published, copy: bool | None = None) -> HostBlock | None:
        """The bytes of a published block for a writer thread; None where it is gone already.

        Full blocks are pinned, and read where they are when their bytes are asked for; a partial tail is copied at once
        (copy=None), since the next turn is likely to write right behind the match inside it. Raises OSError where that
        copy fails.
        """
        self.assert_owner()
        entry = published.entry
        if entry.block is None:
            return None
        block, rows, pool = entry.block, len(entry.tokens), self.pool
        copied = not entry.full if copy is None else copy
        if pool.copier is None and (copied or not pool.host_addressable):
            private = pool.copy_rows(block, rows)
            return HostBlock(nullcontext(pool.staged_windows(private, rows)), private.arrays.clear)
        generation = pool.acquire()
        opened = pool.reading(generation, block, rows)
        if copied:
            handle = HostBlock(opened, generation.drop)
            try:
                handle.buffers()
            except OSError:
                handle.release()
                raise
            return handle
        self.manager.pin(block)

        def release() -> None:
            generation.drop()
            self._released.append(block)

        return HostBlock(opened, release)

    # --- room

    def make_room(self, needed: int, run: int = 0) -> None:
        """See that `needed` blocks can be had, and better a gap of `run`: grow before anything is evicted.

        Raises PoolFull where too few can be had.
        """
        self.drain()
        manager = self.manager
        reachable = manager.available + self.max_blocks - self.pool.blocks
        if reachable < needed:
            raise PoolFull(needed, reachable)
        consent = Consent.YES
        while consent is Consent.YES and self.pool.blocks < self.max_blocks and (
            manager.free < needed or (run > needed and manager.largest_gap() < run)
        ):
            more = max(needed - manager.free, run if run > needed else 0)  # new blocks are one gap: grow once
            consent = self._enlarge(more, needed - manager.available)
        if manager.available < needed:
            raise PoolFull(needed, manager.available, consent is Consent.SOON)

    def run_moves(self) -> None:
        """Make the copies the allocator asked for, before anything is written."""
        self.pool.execute(self.manager.take_moves())

    def layer_caches(self, step: Step) -> list[LayerCache]:
        """What the model takes as its cache in this pass."""
        caches = self._opaque if step.opaque else self._plain
        for layer in caches:
            layer.step = step
        return caches

    @property
    def windowed(self) -> bool:
        """Whether the model has asked any layer for a sliding window."""
        return any(layer.windowed for layer in (*self._plain, *self._opaque))

    def drain(self) -> None:
        """Take back what other threads have released."""
        self.assert_owner()
        while self._released:
            self.manager.unpin(self._released.popleft())
        self.pool.sweep()
        if (over := self._allowed - self.pool.nbytes) > 0:
            self._allowed -= over
            self._on_bytes(-over, False)

    def clear(self, namespace: bytes | None = None) -> int:
        """Forget every cached block that is not in use (of one namespace); returns how many."""
        self.drain()
        return self.manager.clear(namespace)

    @property
    def stats(self) -> CacheStats:
        self.drain()
        manager, block_bytes = self.manager, self.pool.block_bytes
        live = manager.total - manager.free - manager.cached
        return CacheStats(
            block_size=self.block_size,
            blocks_total=manager.total,
            blocks_limit=self.max_blocks,
            blocks_free=manager.free,
            blocks_cached=manager.cached,
            blocks_live=live,
            sequences=len(self.sequences),
            bytes_pool=self.pool.nbytes,
            bytes_live=live * block_bytes,
            bytes_per_token=self.layout.bytes_per_token(),
            evictions=dict(manager.evictions),
        )

    def _enlarge(self, more: int, short: int) -> Consent:
        """Grow to twice the size, or by `more` blocks. Where that is refused and eviction would leave `short` blocks
        missing, by as much as is granted."""
        extra = max(self.pool.blocks, more)
        while (consent := self._grow(extra, extra <= short)) is Consent.NO and extra > short > 0:
            extra = max(extra // 2, short)
        return consent

    def _grow(self, extra: int, needed: bool) -> Consent:
        blocks = min(self.max_blocks, self.pool.blocks + extra)
        nbytes = self.pool.growth_bytes(blocks)
        consent = self._on_bytes(nbytes, needed)
        if consent is not Consent.YES:
            return consent
        self._allowed += nbytes
        if not self.pool.grow(blocks):
            return Consent.NO
        self.manager.grow(blocks)
        return consent
