"""Attention of decode steps by a CUDA kernel (`decode.cu`), which writes the step's new rows too: one launch a layer;
those of quantised KV are quantised by MLX and written before.

Why: MLX runs a step ahead of the device, which then still refers to the pool, so an update as an operation of MLX
copies the whole array first; and each operation costs the host some 10 us, which is what a step takes on a fast GPU.

One of the paths behind `kvd.cache.check`, never the only one: what it does not take, and every other backend, goes the
portable way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import mlx.core as mx

from kvd.cache.inplace import after
from kvd.cache.layout import NATIVE, KVLayout, LayerKV, Precision
from kvd.cache.nvrtc import Kernel, compiled
from kvd.cache.plan import View
from kvd.cache.side import Parts, Side

WARPS: Final = 10
"""of a block: 8 x 32,768 shared rows take 169 us with 8, 149 with 10, 133 with 12, which leaves no register to spare"""
STEP: Final = 16
"""rows that a warp takes at a time"""
BLOCKS: Final = 128
"""blocks of threads that a launch aims at: one for each multiprocessor of a large GPU. With more, joining costs more
than it gains (H200, 32,768 rows: 41 us with 128, 57 with 264, 85 with 1,056). Sequences that share a prefix run side by
side and find it in the cache of the GPU: 8 of them with 32,768 rows take 149 us, 195 in one product over all."""
MOST_REPEATS: Final = 8
"""query heads per KV head: the width of a tile"""
MOST_DIM: Final = 128
WHOLE: Final = 8
WHOLE_FROM: Final = 4
"""A step of 4 to 7 rows is computed with 8: MLX 0.32.4 reads quantised weights once per row up to 7, and once for all
of 8 to 16. H200, an 8B model behind 4,096 rows, ms a step: 1 row 5.5, 2 10.9, 3 14.4, 4 18.2, 6 27.0, 8 14.5, 16 15.2.
"""
LOG2_E: Final = math.log2(math.e)
"""the kernel's exponentials are powers of two"""


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence whose rows are one run of the pool."""

    first: int
    longest: int

    @property
    def total(self) -> int:
        return self.longest


@dataclass(frozen=True, slots=True)
class Tables:
    """Sequences whose rows are anywhere. blocks: [batch, width]; lengths: [batch]; views: what they were made of; what
    else is in the batch has no rows. grown: [batch] lengths that one more row adds."""

    blocks: mx.array
    lengths: mx.array
    grown: mx.array
    views: tuple[View, ...]

    @property
    def longest(self) -> int:
        return max(view.rows for view in self.views)

    @property
    def total(self) -> int:
        return sum(view.rows for view in self.views)

    @staticmethod
    def of(views: Sequence[View], before: Tables | None = None, batch: int = 0) -> Tables:
        """before: tables of the step before, of the same batch; what is still right of them is not brought to the
        device again. batch: rows of the step, where those are more than the sequences."""
        now = tuple(views)
        if before is not None and [view.table for view in now] == [view.table for view in before.views]:
            more = {view.rows - old.rows for view, old in zip(now, before.views, strict=True)}
            if more == {0}:
                return before
            if more == {1}:
                return Tables(before.blocks, before.lengths + before.grown, before.grown, now)
        width = max(len(view.table) for view in now)
        idle = max(batch - len(now), 0)
        padded = [[*view.table, *[0] * (width - len(view.table))] for view in now] + [[0] * width] * idle
        lengths, grown = [view.rows for view in now] + [0] * idle, [1] * len(now) + [0] * idle
        return Tables(
            mx.array(padded, dtype=mx.uint32), mx.array(lengths, dtype=mx.int32), mx.array(grown, dtype=mx.int32), now
        )


def whole(rows: int) -> int:
    """Rows that a step of `rows` sequences is computed with."""
    return max(rows, WHOLE) if rows >= WHOLE_FROM else rows


def takes(layout: KVLayout, block_size: int, query_heads: int) -> bool:
    """Whether the kernel has a form for every layer: halves, or quantised rows that threads can share; head sizes that
    tiles divide, few query heads for a KV head. Block sizes are powers of two."""
    halves = layout.dtype in ("float16", "bfloat16")
    blocks = block_size % STEP == 0 and block_size.bit_count() == 1
    return halves and blocks and all(_takes(layer, query_heads) for layer in layout.layers)


def _takes(layer: LayerKV, query_heads: int) -> bool:
    fits = layer.k_dim % 32 == 0 and layer.v_dim % 64 == 0 and max(layer.k_dim, layer.v_dim) <= MOST_DIM
    shared = _divides(layer.k, layer.k_dim // 4) and _divides(layer.v, layer.v_dim // 8)
    few = query_heads % layer.kv_heads == 0 and query_heads // layer.kv_heads <= MOST_REPEATS
    return fits and shared and few


def _divides(precision: Precision, share: int) -> bool:
    """Whether a thread's share of a row is whole words, within one group."""
    if precision.native:
        return True
    whole = precision.bits in (2, 4, 8) and share * precision.bits % 32 == 0
    return whole and precision.group % share == 0


def attend_paged(
    queries: mx.array, new: tuple[mx.array, mx.array] | None, k: Side, v: Side, where: Span | Tables, scale: float,
    block_size: int, at: mx.array | None = None,
) -> mx.array:  # fmt: skip
    """Rows that each attend to a sequence of their own: [batch, heads, 1, dim] -> [batch, heads, 1, v_dim]; zeros for
    those of no sequence.

    new: keys and values [batch, kv_heads, 1, dim] of each sequence's last row, which is not in the pool yet and is
    written there; None: it is. at: where that is in the pool (`inplace.after`), for quantised KV, whose rows are
    written before.
    """
    batch, heads, _, dim = queries.shape
    sides = [*_three(k.parts, queries), *_three(v.parts, queries)]
    written = queries
    if new is not None and at is not None:
        written = after(_three(k.quantize(new[0]), queries), _three(v.quantize(new[1]), queries), sides, at)
        new = None
    kv_heads, height = k.parts[0].shape[1:3]
    v_dim, repeats = v.dim, heads // kv_heads
    turns = -(-where.longest // (STEP * WARPS))
    fair = max(1, -(-where.total * kv_heads // (STEP * WARPS * BLOCKS)))
    splits = -(-turns // fair)
    scratch, arrived = _scratch(batch * kv_heads * splits * repeats * (v_dim + 2), batch * kv_heads)
    fresh = (queries, queries) if new is None else new
    if isinstance(where, Span):
        tables, width, first, rows = (queries, queries), 0, where.first, where.longest
    else:
        tables, width, first, rows = (where.blocks, where.lengths), where.blocks.shape[1], -1, 0
    return _form(queries.dtype, dim, v_dim, repeats, k.precision, v.precision).launch(
        [queries, *sides, *fresh, *tables, scratch, arrived, written],
        [height, width, block_size.bit_length() - 1, first, rows, int(new is not None), scale * LOG2_E],
        blocks=(splits, kv_heads, batch), threads=WARPS * 32, shape=(batch, heads, 1, v_dim), dtype=queries.dtype,
    )  # fmt: skip


def _three(parts: Parts, other: mx.array) -> Parts:
    """Native rows have neither scales nor biases."""
    return (*parts, other, other)[:3]


@cache
def _form(
    dtype: mx.Dtype, dim: int, v_dim: int, repeats: int, k: Precision = NATIVE, v: Precision = NATIVE
) -> Kernel:
    kind = str(dtype).removeprefix("mlx.core.")
    sides = [number for side in (k, v) for number in ((16, 0) if side.native else (side.bits, side.group))]
    numbers = ", ".join(map(str, (dim, v_dim, repeats, WARPS, *sides)))
    return compiled("decode.cu", f"kvd::decode<kvd::{kind}, {numbers}>")


_held: list[mx.array] = []


def _scratch(floats: int, counters: int) -> tuple[mx.array, mx.array]:
    """What the blocks of a launch leave for each other. Launches follow one another, so all use the same; the counters
    are zero between them."""
    if not _held or _held[0].size < floats or _held[1].size < counters:
        most = [max(floats, _held[0].size), max(counters, _held[1].size)] if _held else [floats, counters]
        _held[:] = [mx.zeros(most[0], dtype=mx.float32), mx.zeros(most[1], dtype=mx.uint32)]
        mx.eval(_held)
    return _held[0], _held[1]
