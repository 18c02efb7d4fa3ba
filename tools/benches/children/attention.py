"""One layer of decode attention over synthetic KV, by each path: where `kvd.cache.paths` gets its borders from."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from kvd.cache.attention import PagedTails, attend_bundle, attend_view
from kvd.cache.hostmem import on_cpu
from kvd.cache.layout import KVLayout, LayerKV
from kvd.cache.paths import Paths, preferences
from kvd.cache.plan import Bundle, Piece, View, bundles
from kvd.cache.pool import KVPool

BLOCK = 256
ROUNDS = 9


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(measure(**json.loads(line))), flush=True)


def measure(heads: int, kv_heads: int, dim: int, rows: int, length: int, shared: bool, dtype: str) -> dict[str, float]:
    """CPU milliseconds by path: `rows` sequences of `length` rows each; shared: all of it but a tail of 100 rows."""
    whole = -(-length // BLOCK)
    own = 1 if shared else whole
    pool = KVPool(KVLayout((LayerKV(kv_heads, dim, dim),), dtype), BLOCK, (whole if shared else 0) + rows * own + 1)
    mx.random.seed(0)
    for array in pool.arrays:
        array[...] = mx.random.normal(array.shape).astype(array.dtype)
    pool.evaluate()
    first = whole if shared else 0
    tables = [
        tuple(range(first)) + tuple(range(first + i * own, first + (i + 1) * own)) for i in range(rows)
    ]
    views = [View(table, first * BLOCK + 100 if shared else length) for table in tables]
    queries = mx.random.normal((rows, heads, 1, dim)).astype(pool.arrays[0].dtype)
    mx.eval(queries)
    wanted = preferences(dtype, BLOCK, on_cpu())
    ways = {
        "chosen": wanted,
        "view": Paths(fold=False, table=shared, grain=wanted.grain),
        "table": Paths(fold=False, table_from=1, grain=wanted.grain),
        "pieces": Paths(fold=False, table=False, view=False),
        "fold": Paths(table_from=1, grain=wanted.grain),
    }
    steps = {name: step(pool, views, queries, paths) for name, paths in ways.items()}
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, run in steps.items():
            begin = time.process_time() if on_cpu() else time.perf_counter()
            mx.eval(run())
            taken[name].append((time.process_time() if on_cpu() else time.perf_counter()) - begin)
    return {name: statistics.median(seconds) * 1e3 for name, seconds in taken.items()}


def step(pool: KVPool, views: list[View], queries: mx.array, paths: Paths) -> Callable[[], mx.array]:
    """What one layer of a decode step does, planned once."""
    plan = [(bundle, PagedTails.of(bundle, BLOCK, paths.grain)) for bundle in bundles(views, BLOCK, paths)]
    scale = queries.shape[-1] ** -0.5

    def run() -> mx.array:
        outs = [attend(pool, bundle, tails, queries, scale, paths) for bundle, tails in plan]
        return outs[0] if len(outs) == 1 else mx.concatenate(outs)

    return run


def attend(pool: KVPool, bundle: Bundle, tails: PagedTails | None, queries: Any, scale: float, paths: Paths) -> Any:
    mine = queries[bundle.rows[0] : bundle.rows[-1] + 1]
    if tails is None and len(bundle.shared) == 1 and len(bundle.rows) == 1 and paths.view:
        piece: Piece = bundle.shared[0]
        return attend_view(mine, pool.k[0], pool.v[0], piece, scale)
    return attend_bundle(mine, pool.k[0], pool.v[0], bundle.shared, tails, scale)


if __name__ == "__main__":
    main()
