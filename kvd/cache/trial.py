"""Attention paths as a program: `python -m kvd.cache.trial view DTYPE` or `… kernel JSON` prints the error relative
to a float32 reference.

A process of its own, since a backend that gets it wrong may end it. For the view path one query row, a pool of the
usual blocks, runs that start inside it and are a multiple of 256 rows long, and one that is not.
"""

from __future__ import annotations

import sys

import mlx.core as mx

from kvd.cache.attention import attend_view
from kvd.cache.check_device import kernel_error
from kvd.cache.layout import KVLayout, LayerKV
from kvd.cache.plan import Piece
from kvd.cache.pool import KVPool

HEADS, DIM, BLOCK, BLOCKS = 2, 128, 256, 130
RUNS = (Piece(256, 768), Piece(256, 800), Piece(512, 33280))


def error(dtype: str) -> float:
    """Largest error over the runs, relative to the largest element of the reference; NaN where one is NaN."""
    pool = KVPool(KVLayout((LayerKV(HEADS, DIM, DIM),), dtype), BLOCK, BLOCKS)
    mx.random.seed(0)
    kind = getattr(mx, dtype)
    shape = (1, HEADS, BLOCK * BLOCKS - 1, DIM)
    pool.write([(array, 1, mx.random.normal(shape).astype(kind)) for array in pool.arrays])
    pool.evaluate()
    queries = mx.random.normal((1, HEADS, 1, DIM)).astype(kind)
    worst = 0.0
    for run in RUNS:
        got = attend_view(queries, pool.k[0], pool.v[0], run, DIM**-0.5).astype(mx.float32)
        keys, values = (mx.contiguous(side.plain(run)).astype(mx.float32) for side in (pool.k[0], pool.v[0]))
        weights = mx.softmax((queries.astype(mx.float32) * DIM**-0.5) @ keys.swapaxes(-1, -2), axis=-1)
        wanted = weights @ values
        found = float((mx.abs(got - wanted).max() / mx.abs(wanted).max()).item())  # type: ignore[arg-type]
        worst = max(worst, found) if found == found else found
        if worst != worst:
            break
    return worst


if __name__ == "__main__":
    path, told = sys.argv[1:]
    print({"view": error, "kernel": kernel_error}[path](told))
