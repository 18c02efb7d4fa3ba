"""How one forward pass reads and writes the pool, chosen by the shape of its batch.

run       one sequence in one run: zero-copy views, the model's own fused attention
chunked   one sequence, several rows at once on the CPU: the exponentials are the cost there, see `chunked`
gathered  one sequence, several rows at once, in several runs or quantised: put together per layer, for this pass only
bundled   decode: rows that share a prefix are folded into one product; rows on their own attend on views of their runs;
          scattered ones through the block table
kernel    decode where there is a kernel for it: every row by its block table, and the new rows are written there
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from kvd.cache.attention import PagedTails, attend_bundle, attend_view
from kvd.cache.chunked import attend_chunk
from kvd.cache.kernel import Span, Tables, attend_paged, whole
from kvd.cache.paths import Paths
from kvd.cache.plan import Bundle, Piece, View, bundles, pieces
from kvd.cache.plugin import OpaqueKV, Step
from kvd.cache.pool import KVPool
from kvd.cache.side import Side

if TYPE_CHECKING:
    from kvd.cache.ahead import Outlook
    from kvd.cache.paged import PagedCache
    from kvd.cache.sequence import CachedSequence

SCATTER_FROM = 4
"""rows of a batch beyond which one scatter is faster than a slice update for each"""


def plan_step(cache: PagedCache, sequences: Sequence[CachedSequence | Outlook], count: int, discard_last: bool) -> Step:
    """count: new tokens per sequence."""
    cache.pool.settle()
    size = cache.block_size
    if discard_last:
        assert count == 1 and len(sequences) == 1 and sequences[0].rows >= 1
    new = 0 if discard_last else count
    views = [view(sequence, sequence.rows + new) for sequence in sequences]
    offsets = [view.rows - count for view in views]
    paths = cache.paths
    if count == 1 and paths.kernel:
        return kernel_step(cache, views, offsets, new)
    if len(views) > 1:
        return BundledStep(cache.pool, paths, views, offsets, new)
    table, rows = views[0].table, views[0].rows
    written = pieces(table, size, rows - new, rows)
    read = pieces(table, size, 0, rows)
    plain = len(read) == 1 and cache.layout.native and not paths.prefers_table(rows, 1, 1)
    if count == 1 and paths.opaque and not plain:
        return BundledStep(cache.pool, paths, views, offsets, new)
    if paths.prefers_chunked(count, rows):
        return ChunkStep(cache.pool, offsets[0], written, read)
    return SingleStep(cache.pool, offsets[0], written, read)


def kernel_step(cache: PagedCache, views: Sequence[View], offsets: Sequence[int], new: int) -> KernelStep:
    batch, at = whole(len(views)), None
    if new and not cache.layout.native:
        rows = [last_row(view, cache.block_size) for view in views]
        at = mx.array([*rows, *[-1] * (batch - len(rows))], dtype=mx.int32)
    if len(views) == 1:
        run = pieces(views[0].table, cache.block_size, 0, views[0].rows)
        if len(run) == 1:
            return KernelStep(cache.pool, Span(run[0].start, run[0].rows), offsets[0], new, at)
    cache.tables = Tables.of(views, cache.tables, batch)
    return KernelStep(cache.pool, cache.tables, offsets[0] if len(views) == 1 else cache.tables.lengths - 1, new, at)


def view(sequence: CachedSequence | Outlook, rows: int) -> View:
    table, blocks = sequence.block_table, -(-rows // sequence.cache.block_size)
    assert len(table) >= blocks, "rows were not reserved"
    return View(table[:blocks], rows)


def last_row(view: View, block_size: int) -> int:
    """Of the pool."""
    block, row = divmod(view.rows - 1, block_size)
    return view.table[block] * block_size + row


class SingleStep:
    """One sequence. Plain arrays: a view of its run, or its rows put together (and dequantised) for this layer."""

    opaque = False

    def __init__(self, pool: KVPool, offset: int, written: Sequence[Piece], read: Sequence[Piece]) -> None:
        self.offset: int | mx.array = offset
        self._pool = pool
        self._written = written
        self._read = read
        self._native = pool.layout.native

    def fetch(self, layer: int, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        pool = self._pool
        if self._native and len(self._read) == 1 and len(self._written) == 1:
            (k,), (v,) = pool.k[layer].parts, pool.v[layer].parts
            start, stop, first = self._written[0].start, self._written[0].stop, self._read[0].start
            pool.write([(k, start, keys), (v, start, values)])
            return k[..., first:stop, :], v[..., first:stop, :]
        return self._side(pool.k[layer], keys), self._side(pool.v[layer], values)

    def _side(self, side: Side, rows: mx.array) -> mx.array:
        if self._written:
            write(self._pool, side, self._written, rows)
        views = [side.view(piece) for piece in self._read]
        if len(views) == 1:
            return side.dequantize(views[0])
        return side.dequantize(tuple(mx.concatenate(list(parts), axis=-2) for parts in zip(*views, strict=True)))


class ChunkStep(SingleStep):
    """A prefill chunk that attends by `attend_chunk`; a mask that is not plainly causal goes to MLX's own attention."""

    opaque = True

    def fetch(self, layer: int, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        k, v = super().fetch(layer, keys, values)
        offset = self.offset
        assert isinstance(offset, int)

        def attend(queries: mx.array, scale: float, mask: Any) -> mx.array:
            if isinstance(mask, str) and mask == "causal":
                return attend_chunk(queries, k, v, scale, offset)
            return mx.fast.scaled_dot_product_attention(queries, k, v, scale=scale, mask=mask)

        handle = OpaqueKV(attend)
        return handle, handle


class PausedStep:
    """A step within which others have their turn, between two layers."""

    def __init__(self, cache: PagedCache, step: Step, pause: Callable[[], None]) -> None:
        self.offset = step.offset
        self.opaque = step.opaque
        self._cache, self._step, self._pause = cache, step, pause

    def fetch(self, layer: int, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        if layer:
            mx.eval(keys, values, self._cache.pool.arrays)
            self._pause()
            self._cache.pool.settle()
            self._cache.layer_caches(self)
        return self._step.fetch(layer, keys, values)


def write(pool: KVPool, side: Side, written: Sequence[Piece], rows: mx.array) -> None:
    """Bring new rows into the pool, in place."""
    items = []
    for array, part in zip(side.parts, side.quantize(rows), strict=True):
        at = 0
        for piece in written:
            items.append((array, piece.start, part[..., at : at + piece.rows, :]))
            at += piece.rows
    pool.write(items)


class BundledStep:
    """One token for each of N sequences (or one, in several runs or quantised)."""

    opaque = True

    def __init__(self, pool: KVPool, paths: Paths, views: Sequence[View], offsets: Sequence[int], new: int) -> None:
        size = pool.block_size
        self._pool = pool
        self.offset: int | mx.array = offsets[0] if len(views) == 1 else mx.array(list(offsets))
        at = [last_row(view, size) for view in views]
        self._written = [Piece(row, row + 1) for row in at]
        self._scattered = mx.array(at)
        self._new = new
        plan = bundles(views, size, paths)
        self._bundles = [(bundle, PagedTails.of(bundle, size, paths.grain)) for bundle in plan]
        order = [row for bundle in plan for row in bundle.rows]
        self._back = None if order == sorted(order) else mx.array([order.index(row) for row in range(len(order))])
        self._fused = pool.layout.native and paths.view

    def fetch(self, layer: int, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        k, v = self._pool.k[layer], self._pool.v[layer]
        if self._new:
            self._write(k, keys)
            self._write(v, values)
        handle = OpaqueKV(lambda queries, scale, mask: self._attend(k, v, queries, scale))
        return handle, handle

    def _write(self, side: Side, rows: mx.array) -> None:
        items = []
        for array, part in zip(side.parts, side.quantize(rows), strict=True):
            if len(self._written) > SCATTER_FROM and not self._pool.launches:
                array[..., self._scattered, :] = part.transpose(2, 1, 0, 3)
            else:
                items += [(array, piece.start, part[i : i + 1]) for i, piece in enumerate(self._written)]
        self._pool.write(items)

    def _attend(self, k: Side, v: Side, queries: mx.array, scale: float) -> mx.array:
        outs = []
        for bundle, tails in self._bundles:
            mine = queries if len(bundle.rows) == queries.shape[0] else _rows(queries, bundle)
            if tails is None and len(bundle.shared) == 1 and len(bundle.rows) == 1 and self._fused:
                outs.append(attend_view(mine, k, v, bundle.shared[0], scale))
            else:
                outs.append(attend_bundle(mine, k, v, bundle.shared, tails, scale))
        out = outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=0)
        return out if self._back is None else out[self._back]


class KernelStep:
    """One token for each of N sequences, the attention of each layer in one launch. at: as of `attend_paged`."""

    opaque = True

    def __init__(
        self, pool: KVPool, where: Span | Tables, offset: int | mx.array, new: int, at: mx.array | None
    ) -> None:
        self.offset = offset
        self._pool = pool
        self._where = where
        self._new = new
        self._at = at

    def fetch(self, layer: int, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        pool, where, at = self._pool, self._where, self._at
        k, v, rows = pool.k[layer], pool.v[layer], (keys, values) if self._new else None
        handle = OpaqueKV(
            lambda queries, scale, mask: attend_paged(queries, rows, k, v, where, scale, pool.block_size, at)
        )
        return handle, handle


def _rows(queries: mx.array, bundle: Bundle) -> mx.array:
    first, last = bundle.rows[0], bundle.rows[-1]
    if last - first + 1 == len(bundle.rows):
        return queries[first : last + 1]
    return queries[mx.array(bundle.rows)]
