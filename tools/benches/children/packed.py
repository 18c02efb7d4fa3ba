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
BURST = 5
"""steps of one before the other's turn"""
WARM = 1
"""rounds"""


def main() -> None:
    model = load(Path(sys.argv[1])).model
    for line in sys.stdin:
        print(json.dumps(compare(model, **json.loads(line))), flush=True)


def compare(model: Any, lengths: list[int], shared: bool, rounds: int) -> dict[str, Any]:
    """Seconds per step of a batch with `lengths` rows: ours, BatchGenerator's and ours one at a time; the median over
    rounds of the faster of those to ours; blocks of ours in use."""
    spare = 2 * (rounds + WARM) * BURST + 8
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
    steps_of = [paged(model, cache, sequences), generator(model, stock, (rounds + WARM) * BURST + 2)]
    if len(lengths) > 1 and not shared:
        singles = [paged(model, cache, [sequence]) for sequence in sequences]
        steps_of.append(lambda: [step() for step in singles] and None)
    took = in_turn(steps_of, rounds)
    return {
        "ours": statistics.median(took[0]), "others": [statistics.median(other) for other in took[1:]],
        "blocks": cache.stats.blocks_live,
        "ratio": statistics.median(min(rest) / mine for mine, *rest in zip(*took, strict=True)),
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
        for _ in range(BURST):
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
        for _ in range(BURST):
            made.next_generated()
        mx.synchronize(made.stream)  # it computes a step ahead: none may run beside others' steps

    return step


def in_turn(steps_of: list[Callable[[], None]], rounds: int) -> list[list[float]]:
    """Seconds per step of each, one after the other in every round, in turned order: drift hits all alike."""
    took: list[list[float]] = [[] for _ in steps_of]
    for index in range(rounds + WARM):
        turn = list(zip(steps_of, took, strict=True))
        for step, into in turn if index % 2 else reversed(turn):
            begin = time.perf_counter()
            step()
            if index >= WARM:
                into.append((time.perf_counter() - begin) / BURST)
    return took


if __name__ == "__main__":
    main()
