"""Batched decode over synthetic KV: our engine's steps and mlx-lm's BatchGenerator on the same rows, in turn.

Both put the next step in line before they read the tokens of the last."""

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

from benches.children.synthetic import engine, filled
from kvd.cache.check import check
from kvd.cache.inspection import inspect_layout
from kvd.cache.paged import CachedSequence, PagedCache
from kvd.models.load import load

BLOCK = 256
BURST = 5
"""steps of one before the other's turn"""
WARM = 1
"""rounds"""


def main() -> None:
    loaded = load(Path(sys.argv[1]))
    for line in sys.stdin:
        print(json.dumps(compare(loaded.model, loaded.tokenizer, **json.loads(line))), flush=True)


def compare(model: Any, tokenizer: Any, lengths: list[int], shared: bool, rounds: int) -> dict[str, Any]:
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
    ours = burst(engine(model, tokenizer, cache, sequences))
    steps_of = [ours, generator(model, stock, (rounds + WARM) * BURST + 2)]
    if len(lengths) > 1 and not shared:
        singles = [burst(engine(model, tokenizer, cache, [sequence])) for sequence in sequences]

        def one_by_one() -> None:
            for steps in singles:
                steps()

        steps_of.append(one_by_one)
    took = in_turn(steps_of, rounds)
    return {
        "ours": statistics.median(took[0]), "others": [statistics.median(other) for other in took[1:]],
        "blocks": cache.stats.blocks_live,
        "ratio": statistics.median(min(rest) / mine for mine, *rest in zip(*took, strict=True)),
    }  # fmt: skip


def burst(step: Callable[[], None]) -> Callable[[], None]:
    """Some steps of ours, and the one that was put in line: none may run beside others' steps."""

    def steps() -> None:
        for _ in range(BURST):
            step()
        mx.synchronize()

    return steps


def generator(model: Any, stock: list[list[KVCache]], most: int) -> Callable[[], None]:
    count = len(stock)
    made = BatchGenerator(model, max_tokens=most, completion_batch_size=count, prefill_batch_size=count)
    made.insert([[5]] * count, caches=stock)

    def steps() -> None:
        for _ in range(BURST):
            made.next_generated()
        mx.synchronize(made.stream)  # it computes a step ahead too

    return steps


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
