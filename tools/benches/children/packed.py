"""Batched decode over synthetic KV: our paged pool and mlx-lm's BatchGenerator on the same rows, in turn."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import KVCache

from kvd.cache.check import check
from kvd.cache.inspection import inspect_layout
from kvd.cache.paged import CachedSequence, PagedCache, forward
from kvd.models.load import load

BLOCK = 256
WARM = 3


def main() -> None:
    model = load(Path(sys.argv[1])).model
    for line in sys.stdin:
        print(json.dumps(compare(model, **json.loads(line))), flush=True)


def compare(model: Any, lengths: list[int], shared: bool, steps: int) -> dict[str, Any]:
    """Seconds per step of a batch with `lengths` rows, of both and of ours one at a time; blocks of ours in use."""
    spare = steps + WARM + 8
    layout = inspect_layout(model)
    blocks = sum(-(-(n + spare) // BLOCK) for n in (lengths[:1] if shared else lengths)) + 2 * len(lengths)
    cache = PagedCache(layout, BLOCK, blocks, initial_blocks=blocks, namespace=bytes(16))
    cache.paths = check(model, layout, BLOCK, "bench").paths
    stock: list[list[KVCache]] = [[KVCache() for _ in layout.layers] for _ in lengths]
    sequences: list[CachedSequence] = []
    for index, rows in enumerate(lengths):
        if shared and index:
            sequences.append(sequences[0].fork())
            continue
        sequences.append(filled(cache, rows, spare, index, stock if shared else [stock[index]]))
    ours, theirs = paged(model, cache, sequences), generator(model, stock, steps + WARM + 2)
    together, batch = in_turn(ours, theirs, steps)
    used = cache.stats.blocks_live
    alone: list[float] = []
    if not shared:
        for sequence in sequences:
            alone.append(statistics.median(in_turn(paged(model, cache, [sequence]), None, 3)[0]))
    return {
        "ours": statistics.median(together), "stock": statistics.median(batch), "alone": sum(alone), "blocks": used,
        "ratio": statistics.median(b / a for a, b in zip(together, batch, strict=True)),
    }  # fmt: skip


def filled(cache: PagedCache, rows: int, spare: int, seed: int, stock: list[list[KVCache]]) -> CachedSequence:
    """A sequence of random rows in the pool, the same rows in mlx-lm's caches."""
    mx.random.seed(seed)
    sequence = cache.open([], None, expected_rows=rows + spare)
    sequence.reserve(rows)
    at = sequence.block_table[0] * BLOCK
    for index, layer in enumerate(cache.layout.layers):
        for name, side in (("keys", cache.pool.k[index]), ("values", cache.pool.v[index])):
            values = mx.random.normal((1, layer.kv_heads, rows, layer.k_dim))
            side.parts[0][..., at : at + rows, :] = values
            for caches in stock:
                setattr(caches[index], name, values)
                caches[index].offset = rows
        cache.pool.evaluate()
    sequence.advance([seed] * rows)
    return sequence


def paged(model: Any, cache: PagedCache, sequences: list[CachedSequence]) -> Callable[[], None]:
    def step() -> None:
        for sequence in sequences:
            sequence.reserve(1)
        logits = forward(model, cache, [(sequence, [5]) for sequence in sequences])
        assert logits is not None
        mx.eval(mx.argmax(logits, axis=-1))
        for sequence in sequences:
            sequence.advance([5])

    return step


def generator(model: Any, stock: list[list[KVCache]], most: int) -> Callable[[], None]:
    count = len(stock)
    made = BatchGenerator(model, max_tokens=most, completion_batch_size=count, prefill_batch_size=count)
    made.insert([[5]] * count, caches=stock)

    def step() -> None:
        made.next_generated()

    return step


def in_turn(
    first: Callable[[], None], second: Callable[[], None] | None, steps: int
) -> tuple[list[float], list[float]]:
    took: tuple[list[float], list[float]] = ([], [])
    for index in range(steps + WARM):
        for step, into in zip((first, second), took, strict=True):
            if step is not None:
                begin = time.perf_counter()
                step()
                if index >= WARM:
                    into.append(time.perf_counter() - begin)
    return took


if __name__ == "__main__":
    main()
