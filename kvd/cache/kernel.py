"""Attention of decode steps by a CUDA kernel (`decode.cu`): any block table, any lengths, two launches a layer.

One of the paths behind `kvd.cache.check`, never the only one: what it does not take, and every other backend, goes the
portable way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, Final

import mlx.core as mx

from kvd.cache.layout import KVLayout, LayerKV
from kvd.cache.plan import Bundle
from kvd.cache.side import Side

SPLIT: Final = 128
"""rows of a sequence that one group of threads takes"""
WARPS: Final = 4
PARTS: Final = 4
"""how many at a time join the splits of a query head"""
MOST_REPEATS: Final = 8
"""query heads per KV head: each needs registers"""
LOAD: Final = 16
"""bytes a thread reads at once"""


@dataclass(frozen=True, slots=True)
class Tables:
    """Block tables of a decode batch: [batch, width] and [batch]; splits of the longest."""

    blocks: mx.array
    lengths: mx.array
    splits: int

    @staticmethod
    def of(bundle: Bundle) -> Tables:
        """All rows of a bundle that shares nothing: its tails are whole sequences."""
        width = max(len(tail) for tail in bundle.tails)
        padded = [[*tail, *[0] * (width - len(tail))] for tail in bundle.tails]
        return Tables(
            mx.array(padded, dtype=mx.uint32), mx.array(bundle.lengths, dtype=mx.int32),
            -(-max(bundle.lengths) // SPLIT),
        )  # fmt: skip


def available() -> bool:
    """Whether this process's device takes CUDA kernels."""
    return mx.default_device() != mx.Device(mx.cpu) and bool(mx.cuda.is_available())


def takes(layout: KVLayout, block_size: int, query_heads: int) -> bool:
    """Whether the kernel has a form for every layer: native KV, a row in 1 to 32 loads, at most eight query heads."""
    return all(_takes(layer, layout.dtype, block_size, query_heads) for layer in layout.layers)


def _takes(layer: LayerKV, dtype: str, block_size: int, query_heads: int) -> bool:
    native = layer.k.native and layer.v.native
    loads = [dim * getattr(mx, dtype).size / LOAD for dim in (layer.k_dim, layer.v_dim)]
    fits = all(n in (1, 2, 4, 8, 16, 32) for n in loads) and PARTS * layer.v_dim <= 1024
    few = query_heads % layer.kv_heads == 0 and query_heads // layer.kv_heads <= MOST_REPEATS
    return native and fits and few and (block_size % SPLIT == 0 or SPLIT % block_size == 0)


def attend_paged(queries: mx.array, k: Side, v: Side, tables: Tables, scale: float, block_size: int) -> mx.array:
    """Rows that each attend to a sequence of their own: [batch, heads, 1, dim] -> [batch, heads, 1, v_dim]."""
    batch, heads, _, dim = queries.shape
    (keys,), (values,) = k.parts, v.parts
    kv_heads, v_dim = keys.shape[1], values.shape[3]
    repeats = heads // kv_heads
    template: list[tuple[str, Any]] = [
        ("T", keys.dtype), ("D", dim), ("DV", v_dim), ("G", repeats), ("BLOCK", block_size), ("SPLIT", SPLIT),
        ("WARPS", WARPS), ("PARTS", PARTS),
    ]  # fmt: skip
    partial, stats = _split()(
        inputs=[queries.astype(keys.dtype), keys, values, tables.blocks, tables.lengths, _exponent(scale)],
        template=template,
        grid=(batch * tables.splits * WARPS * 32, kv_heads, 1),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[(batch, kv_heads, tables.splits, repeats, v_dim), (batch, kv_heads, tables.splits, repeats, 2)],
        output_dtypes=[mx.float32, mx.float32],
    )
    (out,) = _join()(
        inputs=[partial, stats, tables.lengths],
        template=template,
        grid=(repeats * PARTS * v_dim, kv_heads, batch),
        threadgroup=(PARTS * v_dim, 1, 1),
        output_shapes=[(batch, heads, 1, v_dim)],
        output_dtypes=[keys.dtype],
    )
    result: mx.array = out
    return result


@cache
def _source() -> str:
    """`decode.cu` without its comments: MLX takes the hash of all of it with every call."""
    lines = (files("kvd.cache") / "decode.cu").read_text().splitlines()
    return "\n".join(line.partition("//")[0].strip() for line in lines if line.partition("//")[0].strip()) + "\n"


@cache
def _split() -> Any:
    return mx.fast.cuda_kernel(
        name="kvd_attend_split",
        input_names=["q", "k", "v", "blocks", "lengths", "scale"],
        output_names=["partial", "stats"],
        header=_source(),
        source=(
            "kvd::attend_split<T, D, DV, G, BLOCK, SPLIT, WARPS>("
            "q, k, v, blocks, lengths, scale[0], k_shape[2], blocks_shape[1], lengths_shape[0], partial, stats);"
        ),
    )


@cache
def _join() -> Any:
    return mx.fast.cuda_kernel(
        name="kvd_join_splits",
        input_names=["partial", "stats", "lengths"],
        output_names=["out"],
        header=_source(),
        source="kvd::join_splits<T, DV, G, SPLIT, PARTS>(partial, stats, lengths, partial_shape[2], out);",
    )


@lru_cache(maxsize=16)
def _exponent(scale: float) -> mx.array:
    """[1]: the scale of the scores, for exponentials that are powers of two."""
    value = mx.array([scale * math.log2(math.e)], dtype=mx.float32)
    mx.eval(value)
    return value
