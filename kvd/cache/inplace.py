"""Rows into arrays of the pool, in place.

MLX updates an array in place when nothing else refers to its buffer; work in flight on a GPU still does, and then all
of the array is copied. On CUDA, where MLX runs far ahead, a kernel writes the rows instead, so that the pool's buffers
stay where they are for good; MLX knows nothing of it, so what follows is put in line separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from kvd.cache.kernel import numbers

Item = tuple[mx.array, int, mx.array]
"""(array of the pool [1, heads, height, width], first row, rows [1, heads, n, width] of the same type)"""
THREADS = 256
SOURCE = """
using Load = typename kvd::Bytes<VEC>::Type;
const int per = pool_shape[3] * int(sizeof(T)) / VEC, count = rows_shape[2], first = at_shape[0] - 1;
const int64_t number = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
if (number == 0) {
  done[0] = reinterpret_cast<uint64_t>(pool);
}
if (number < int64_t(rows_shape[1]) * count * per) {
  const int part = number % per, row = number / per % count, head = number / per / count;
  const T* from = rows + head * rows_strides[1] + row * rows_strides[2];
  T* into = const_cast<T*>(pool) + (int64_t(head) * pool_shape[2] + first + row) * pool_shape[3];
  reinterpret_cast<Load*>(into)[part] = reinterpret_cast<const Load*>(from)[part];
}
"""
HEADER = """
namespace kvd {
template <int N> struct Bytes;
template <> struct Bytes<16> { using Type = uint4; };
template <> struct Bytes<8> { using Type = uint2; };
template <> struct Bytes<4> { using Type = unsigned; };
template <> struct Bytes<2> { using Type = unsigned short; };
}
"""


def assign(items: Sequence[Item]) -> list[mx.array]:
    """As operations of MLX: whatever reads the arrays from now on sees them. Returns what is to be evaluated: nothing
    besides the arrays."""
    for array, first, rows in items:
        array[..., first : first + rows.shape[2], :] = rows
    return []


def launch(items: Sequence[Item]) -> list[mx.array]:
    """By a kernel, put in line at once: whatever is put in line from now on sees them. Returns what is evaluated when
    they are written: for each item where its array lies on the device."""
    done = [_launched(*item) for item in items]
    mx.async_eval(done)
    return done


def addresses(arrays: Sequence[mx.array]) -> list[int]:
    """Where evaluated arrays lie on the device, told by the kernel that writes them: each row 0 onto itself. To be
    asked before anybody else writes there. MLX compiles a kernel anew in every process, which takes seconds, so this is
    not one of its own."""
    places = launch([(array, 0, array[..., :1, :]) for array in arrays])
    mx.eval(places)
    mx.synchronize()
    return [int(place.item()) for place in places]  # type: ignore[arg-type]


def _launched(array: mx.array, first: int, rows: mx.array) -> mx.array:
    _, heads, count, width = rows.shape
    if rows.dtype != array.dtype:
        raise ValueError(f"rows of {rows.dtype} for a pool of {array.dtype}")
    row_bytes = width * array.dtype.size
    load = next(n for n in (16, 8, 4, 2) if row_bytes % n == 0)
    needed = heads * count * row_bytes // load
    (done,) = _kernel()(
        inputs=[rows, array, numbers(first + 1, 1)],
        template=[("T", array.dtype), ("VEC", load)],
        grid=(-(-needed // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.uint64],
    )
    result: mx.array = done
    return result


@cache
def _kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="kvd_write_rows", input_names=["rows", "pool", "at"], output_names=["done"], header=HEADER,
        source=SOURCE, ensure_row_contiguous=False,
    )  # fmt: skip
