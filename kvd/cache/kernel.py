"""Attention of decode steps by a CUDA kernel (`decode.cu`), which writes the step's new rows too: one launch a layer.

Why: MLX runs a step ahead of the device, which then still refers to the pool, so an update as an operation of MLX
copies the whole array first; and each operation costs the host some 10 us, which is what a step takes on a fast GPU.

One of the paths behind `kvd.cache.check`, never the only one: what it does not take, and every other backend, goes the
portable way. MLX does not know of its writes. They are in order with everything that is put in line after the step has
been (`mx.async_eval`); nothing else that changes the pool may be part of the same evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, Final

import mlx.core as mx

from kvd.cache.layout import KVLayout, LayerKV
from kvd.cache.plan import View
from kvd.cache.side import Side

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
    """Sequences whose rows are anywhere. blocks: [batch, width]; lengths: [batch]; views: what they were made of."""

    blocks: mx.array
    lengths: mx.array
    views: tuple[View, ...]

    @property
    def longest(self) -> int:
        return max(view.rows for view in self.views)

    @property
    def total(self) -> int:
        return sum(view.rows for view in self.views)

    @staticmethod
    def of(views: Sequence[View], before: Tables | None = None) -> Tables:
        """before: tables of the step before; what is still right of them is not brought to the device again."""
        now = tuple(views)
        if before is not None and [view.table for view in now] == [view.table for view in before.views]:
            grown = {view.rows - old.rows for view, old in zip(now, before.views, strict=True)}
            if grown == {0}:
                return before
            if grown == {1}:
                return Tables(before.blocks, before.lengths + 1, now)
        width = max(len(view.table) for view in now)
        padded = [[*view.table, *[0] * (width - len(view.table))] for view in now]
        lengths = [view.rows for view in now]
        return Tables(mx.array(padded, dtype=mx.uint32), mx.array(lengths, dtype=mx.int32), now)


def available() -> bool:
    """Whether this process's device takes CUDA kernels."""
    return mx.default_device() != mx.Device(mx.cpu) and bool(mx.cuda.is_available())


def takes(layout: KVLayout, block_size: int, query_heads: int) -> bool:
    """Whether the kernel has a form for every layer: native halves, head sizes that tiles divide, few query heads."""
    halves = layout.dtype in ("float16", "bfloat16")
    return halves and block_size % STEP == 0 and all(_takes(layer, query_heads) for layer in layout.layers)


def _takes(layer: LayerKV, query_heads: int) -> bool:
    native = layer.k.native and layer.v.native
    fits = layer.k_dim % 32 == 0 and layer.v_dim % 64 == 0 and max(layer.k_dim, layer.v_dim) <= MOST_DIM
    return native and fits and query_heads % layer.kv_heads == 0 and query_heads // layer.kv_heads <= MOST_REPEATS


def attend_paged(
    queries: mx.array, new: tuple[mx.array, mx.array] | None, k: Side, v: Side, where: Span | Tables, scale: float,
    block_size: int,
) -> mx.array:  # fmt: skip
    """Rows that each attend to a sequence of their own: [batch, heads, 1, dim] -> [batch, heads, 1, v_dim].

    new: keys and values [batch, kv_heads, 1, dim] of each sequence's last row, which is not in the pool yet and is
    written there; None: it is.
    """
    batch, heads, _, dim = queries.shape
    (keys,), (values,) = k.parts, v.parts
    kv_heads, v_dim = keys.shape[1], values.shape[3]
    repeats = heads // kv_heads
    turns = -(-where.longest // (STEP * WARPS))
    fair = max(1, -(-where.total * kv_heads // (STEP * WARPS * BLOCKS)))
    splits = -(-turns // fair)
    scratch, arrived = _scratch(batch * kv_heads * splits * repeats * (v_dim + 2), batch * kv_heads)
    fresh = (queries, queries) if new is None else new
    blocks, lengths = _no_tables() if isinstance(where, Span) else (where.blocks, where.lengths)
    first, rows = (where.first + 2, where.longest) if isinstance(where, Span) else (1, 1)
    told = numbers(first, rows, 1 if new is None else 2)
    (out,) = _kernel()(
        inputs=[
            queries, keys, values, *fresh, blocks, lengths, told, _exponent(scale), scratch, arrived,
        ],
        template=[
            ("T", keys.dtype), ("D", dim), ("DV", v_dim), ("G", repeats), ("BLOCK", block_size), ("WARPS", WARPS)
        ],
        grid=(splits * WARPS * 32, kv_heads, batch),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[(batch, heads, 1, v_dim)],
        output_dtypes=[keys.dtype],
    )  # fmt: skip
    result: mx.array = out
    return result


BODY: Final = """
const int head = blockIdx.y, sequence = blockIdx.z, splits = gridDim.x, first = number_shape[0] - 2;
const bool run = first >= 0;
const size_t both = size_t(sequence) * gridDim.y + head;
kvd::attend<T, D, DV, G, BLOCK, WARPS>(
    q + sequence * q_strides[0] + head * G * q_strides[1], q_strides[1],
    const_cast<T*>(k) + size_t(head) * k_shape[2] * D, const_cast<T*>(v) + size_t(head) * k_shape[2] * DV,
    number_shape[2] == 2, new_k + sequence * new_k_strides[0] + head * new_k_strides[1],
    new_v + sequence * new_v_strides[0] + head * new_v_strides[1],
    run ? nullptr : blocks + sequence * blocks_shape[1], first, run ? number_shape[1] : lengths[sequence], scale[0],
    splits, blockIdx.x, const_cast<float*>(scratch) + both * splits * G * (DV + 2),
    const_cast<uint32_t*>(arrived) + both, out + both * G * DV);
"""


@cache
def _kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="kvd_attend",
        input_names=["q", "k", "v", "new_k", "new_v", "blocks", "lengths", "number", "scale", "scratch", "arrived"],
        output_names=["out"],
        header=_source(),
        source=BODY,
        ensure_row_contiguous=False,
    )


def numbers(*shape: int) -> mx.array:
    """A view without memory: its shape reaches a kernel with the launch, whereas numbers in an array would have to be
    brought to the device in every step. None may be 0."""
    return mx.broadcast_to(_one(), shape)


@cache
def _source() -> str:
    """`decode.cu` without its comments: MLX takes the hash of all of it with every call."""
    lines = (line.partition("//")[0].strip() for line in (files("kvd.cache") / "decode.cu").read_text().splitlines())
    return "\n".join(filter(None, lines)) + "\n"


@lru_cache(maxsize=16)
def _exponent(scale: float) -> mx.array:
    """[1]: the scale of the scores, for exponentials that are powers of two."""
    return _kept(mx.array([scale * math.log2(math.e)], dtype=mx.float32))


@cache
def _one() -> mx.array:
    return _kept(mx.array([1], dtype=mx.uint8))


@cache
def _no_tables() -> tuple[mx.array, mx.array]:
    """In the place of tables: types are part of the kernel, which is compiled once for both."""
    return _kept(mx.zeros((1, 1), dtype=mx.uint32)), _kept(mx.zeros(1, dtype=mx.int32))


_held: list[mx.array] = []


def _scratch(floats: int, counters: int) -> tuple[mx.array, mx.array]:
    """What the blocks of a launch leave for each other. Launches follow one another, so all use the same; the counters
    are zero between them."""
    if not _held or _held[0].size < floats or _held[1].size < counters:
        most = [max(floats, _held[0].size), max(counters, _held[1].size)] if _held else [floats, counters]
        _held[:] = [_kept(mx.zeros(most[0], dtype=mx.float32)), _kept(mx.zeros(most[1], dtype=mx.uint32))]
    return _held[0], _held[1]


def _kept(array: mx.array) -> mx.array:
    mx.eval(array)
    return array
