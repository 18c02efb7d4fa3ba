"""Rows into arrays of the pool, in place.

MLX updates an array in place when nothing else refers to its buffer; work in flight on a GPU still does, and then all
of the array is copied. On CUDA, where MLX runs far ahead, a kernel writes the rows instead, so that the pool's buffers
stay where they are for good; MLX knows nothing of it, so what follows is put in line separately.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from kvd.cache.nvrtc import compiled

Item = tuple[mx.array, int, mx.array]
"""(array of the pool [1, heads, height, width], first row, rows [1, heads, n, width] of the same type)"""
THREADS = 256
LOADS = {16: "uint4", 8: "uint2", 4: "unsigned", 2: "unsigned short"}
"""what a thread copies, by bytes"""


def assign(items: Sequence[Item]) -> list[mx.array]:
    """As operations of MLX: whatever reads the arrays from now on sees them. Returns what is to be evaluated: nothing
    besides the arrays."""
    for array, first, rows in items:
        count = rows.shape[2]
        if count < array.shape[2]:
            array[..., first : first + count, :] = rows
        else:  # as many as there are: MLX would take `rows` for the array from now on, with their buffer and strides
            array[..., :1, :] = rows[..., :1, :]
            array[..., 1:, :] = rows[..., 1:, :]
    return []


def launch(items: Sequence[Item]) -> list[mx.array]:
    """By a kernel, put in line at once: whatever is put in line from now on sees them. Returns what is evaluated when
    they are written: for each item where its array lies on the device."""
    done = [_launched(*item) for item in items]
    mx.async_eval(done)
    return done


def addresses(arrays: Sequence[mx.array]) -> list[int]:
    """Where evaluated arrays lie on the device, told by the kernel that writes them: each row 0 onto itself. To be
    asked before anybody else writes there."""
    places = launch([(array, 0, array[..., :1, :]) for array in arrays])
    mx.eval(places)
    mx.synchronize()
    return [int(place.item()) for place in places]  # type: ignore[arg-type]


def after(k: Sequence[mx.array], v: Sequence[mx.array], pool: Sequence[mx.array], at: mx.array) -> mx.array:
    """Rows of K and of V [batch, kv_heads, 1, width], as (words, scales, biases) or (rows, any, any), to be written
    into the arrays of a layer in the same order: each into a row of its own, `at` [batch] int32; negative: into none.
    A kernel that gets the result among its inputs runs when they are written."""
    count, heads = k[0].shape[:2]
    sizes = []
    for words, scales, _ in (k, v):
        quantised = words.dtype == mx.uint32
        sizes += [words.shape[3] * words.dtype.size // 4, scales.shape[3] if quantised else 0]
    each = sizes[0] + 2 * sizes[1] + sizes[2] + 2 * sizes[3]
    return compiled("rows.cu", "kvd::write_quantised").launch(
        [*k, *v, *pool, at], [count, heads, pool[0].shape[2], *sizes],
        blocks=(-(-count * heads * each // THREADS), 1, 1), threads=THREADS, shape=(1,), dtype=mx.int32,
    )  # fmt: skip


def _launched(array: mx.array, first: int, rows: mx.array) -> mx.array:
    _, heads, count, _ = rows.shape
    load, per = _loads(array, rows)
    return compiled("rows.cu", f"kvd::write_rows<{load}>").launch(
        [rows, array], [heads, count, per, array.shape[2], first],
        blocks=(-(-heads * count * per // THREADS), 1, 1), threads=THREADS, shape=(1,), dtype=mx.uint64,
    )  # fmt: skip


def _loads(array: mx.array, rows: mx.array) -> tuple[str, int]:
    """What a thread copies, and how many of these a row has."""
    if rows.dtype != array.dtype:
        raise ValueError(f"rows of {rows.dtype} for a pool of {array.dtype}")
    row_bytes = array.shape[3] * array.dtype.size
    size = next(size for size in LOADS if row_bytes % size == 0)
    return LOADS[size], row_bytes // size
