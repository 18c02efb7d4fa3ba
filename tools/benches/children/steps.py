"""Decode steps of one model over synthetic KV: ours on the paged pool, mlx-lm's on its KVCache, in turn."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from benches.children.synthetic import filled, single
from benches.rows import median_ratio, paired
from kvd.cache.inspection import inspect_layout
from kvd.cache.paged import PagedCache
from kvd.models.load import load

BLOCK = 256


def main() -> None:
    model = load(Path(sys.argv[1])).model
    for line in sys.stdin:
        ask = json.loads(line)
        measure: Callable[..., dict[str, Any]] = {"decode": decode, "growth": growth}[ask.pop("what")]
        print(json.dumps(measure(model, **ask)), flush=True)


def decode(model: Any, position: int, pairs: int) -> dict[str, Any]:
    """Seconds per step of both, and the median of the ratios of pairs."""
    ours, stock = paged_step(model, position, pairs), stock_step(model, position)
    for _ in range(5):
        ours(), stock()
    mine, theirs = paired(lambda: timed(ours), lambda: timed(stock), pairs)
    ratio = median_ratio(mine, theirs)
    return {"ours": statistics.median(mine), "stock": statistics.median(theirs), "ratio": ratio}


def timed(step: Callable[[], None]) -> float:
    """Seconds."""
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def growth(model: Any, blocks: int, steps: int) -> dict[str, Any]:
    """Seconds of one decode step of a short sequence in a pool of `blocks` blocks, and the extra peak bytes."""
    step = paged_step(model, BLOCK, steps, blocks)
    for _ in range(5):
        step()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    took = [timed(step) for _ in range(steps)]
    return {"seconds": statistics.median(took), "extra_bytes": mx.get_peak_memory() - before}


def paged_step(model: Any, position: int, steps: int, blocks: int = 0) -> Callable[[], None]:
    layout = inspect_layout(model)
    room = steps + 16
    blocks = max(-(-(position + room) // BLOCK), blocks)
    cache = PagedCache(layout, BLOCK, blocks, initial_blocks=blocks, namespace=bytes(16))
    return single(model, cache, filled(cache, position, room))


def stock_step(model: Any, position: int) -> Callable[[], None]:
    cache = make_prompt_cache(model)
    attention = model.layers[0].self_attn
    for layer in cache:
        shape = (1, attention.n_kv_heads, position, attention.head_dim)
        layer.update_and_fetch(mx.random.normal(shape), mx.random.normal(shape))
    mx.eval([layer.state for layer in cache])
    token = mx.array([[1]])

    def step() -> None:
        mx.eval(mx.argmax(model(token, cache=cache)[:, -1], axis=-1))

    return step


if __name__ == "__main__":
    main()
