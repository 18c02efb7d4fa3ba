"""Sequences of random rows, and how they go on: time does not depend on the values of KV."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from kvd.cache.paged import CachedSequence, PagedCache, forward
from kvd.worker.compute import Computer
from kvd.worker.generation import Generation
from kvd.worker.live import Live
from kvd.worker.outbox import Outbox
from kvd.worker.params import Params, Sampling
from kvd.worker.planner import Rates
from kvd.worker.prompt import Prompt
from kvd.worker.request import Choice, Request, Times
from kvd.worker.sampler import Drawer
from kvd.worker.scheduler import Limits, Stage
from kvd.worker.text import PLAIN, Answer

TOKEN = 5
"""fed first"""


def filled(
    cache: PagedCache, rows: int, room: int, seed: int = 0, stock: Sequence[Sequence[Any]] = ()
) -> CachedSequence:
    """A sequence of `rows` random rows with room for `room` more; the same rows in mlx-lm's caches, a list of layers
    each."""
    mx.random.seed(seed)
    sequence = cache.open([], None, expected_rows=rows + room)
    sequence.reserve(rows)
    at = sequence.block_table[0] * cache.block_size
    assert len(sequence.runs()) == 1
    for index, layer in enumerate(cache.layout.layers):
        for name, side, dim in (
            ("keys", cache.pool.k[index], layer.k_dim), ("values", cache.pool.v[index], layer.v_dim),
        ):  # fmt: skip
            new = mx.random.normal((1, layer.kv_heads, rows, dim)).astype(getattr(mx, cache.layout.dtype))
            for array, part in zip(side.parts, side.quantize(new), strict=True):
                array[..., at : at + rows, :] = part
            for caches in stock:
                setattr(caches[index], name, new)
                caches[index].offset = rows
        cache.pool.evaluate()
    sequence.advance([seed] * rows)
    return sequence


def single(model: Any, cache: PagedCache, sequence: CachedSequence) -> Callable[[], None]:
    """One step by itself, begun and waited for: what the pass costs, with nothing beside it."""

    def step() -> None:
        sequence.reserve(1)
        logits = forward(model, cache, [(sequence, [TOKEN])])
        assert logits is not None
        mx.eval(mx.argmax(logits, axis=-1))
        sequence.advance([TOKEN])

    return step


def engine(model: Any, tokenizer: Any, cache: PagedCache, sequences: Sequence[CachedSequence]) -> Callable[[], None]:
    """One step of the engine: a token for each, the next step put in line before they are read, and their text."""
    nobody: Any = None  # answers without an end: nothing is finished or stored
    rates = Rates()
    computer = Computer(model, cache, rates, lambda choice, block: None)
    generation = Generation(
        tokenizer, frozenset(), cache, computer, nobody, Live(), Outbox(), rates, Limits, lambda phase, seconds: None,
        time.monotonic,
    )  # fmt: skip
    prompt = Prompt((TOKEN,), Params("generate", Sampling()), PLAIN)
    choices = [
        Choice(
            Request(str(index), prompt, bytes(16), Times(0.0)), 0, [TOKEN], Drawer(Sampling(), output=[TOKEN]),
            Answer(tokenizer), Stage.DECODING, sequence,
        )
        for index, sequence in enumerate(sequences)
    ]  # fmt: skip
    return lambda: generation.decode(choices, alone=True)
