"""One setting over the real pool and attention paths: prefill, questions, needles, the last positions of the text.

Owned by the thread that loaded the model, like everything of mlx.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from kvd.cache.layout import KVLayout
from kvd.cache.paged import CachedSequence, PagedCache, forward
from kvd.cache.paths import Paths
from kvd.cache.plan import pieces
from kvd.cache.steps import plan_step, write
from kvd.calibrate.material import Material, Probe
from kvd.calibrate.plan import ANSWER

SPARE_BLOCKS: Final = 3
"""per fork: a copy of the shared tail, and what it writes behind"""
SPACE: Final = bytes(16)


@dataclass(frozen=True, slots=True)
class Setup:
    """What every trial uses. block and chunk in tokens."""

    model: Any
    paths: Callable[[KVLayout], Paths]
    """the attention paths that work for a layout on this device"""
    block: int
    chunk: int
    stops: frozenset[int]
    tick: Callable[[], None]
    """called after every pass"""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A pool that holds the prefix. Bytes are beyond what mlx held before the pool was made."""

    cache: PagedCache
    sequence: CachedSequence
    pool_bytes: int
    peak_bytes: int
    seconds: float


def prefill(setup: Setup, layout: KVLayout, material: Material) -> Prefilled:
    """The prefix, chunk by chunk on the worker's grid, into a pool of this layout that is as large as the text."""
    paths = setup.paths(layout)
    let_go()
    before = mx.get_active_memory()
    cache, sequence = _open(setup, layout, material, paths)
    pool_bytes = mx.get_active_memory() - before
    mx.reset_peak_memory()
    began = time.perf_counter()
    while sequence.rows < len(material.prefix):
        part = list(material.prefix[sequence.rows : sequence.rows + setup.chunk])
        sequence.reserve(len(part))
        forward(setup.model, cache, [(sequence, part)], logits=False)
        sequence.advance(part)
        setup.tick()
    seconds = time.perf_counter() - began
    return Prefilled(cache, sequence, pool_bytes, mx.get_peak_memory() - before, seconds)


def transplant(setup: Setup, layout: KVLayout, material: Material, native: Prefilled) -> Prefilled:
    """The prefix as native KV has it, quantised once into a pool of this layout: no row goes through the model."""
    let_go()
    cache, sequence = _open(setup, layout, material, native.cache.paths)
    rows, size = len(material.prefix), setup.block
    sequence.reserve(rows)
    table = sequence.block_table
    into = pieces(table, size, 0, rows)
    for source, target in ((native.cache.pool.k, cache.pool.k), (native.cache.pool.v, cache.pool.v)):
        for have, want in zip(source, target, strict=True):
            for piece, start in zip(into, _starts(into), strict=True):
                held = pieces(native.sequence.block_table, size, start, start + piece.rows)
                taken = [have.plain(one) for one in held]
                write(cache.pool, want, [piece], taken[0] if len(taken) == 1 else mx.concatenate(taken, axis=-2))
                del taken
            cache.pool.evaluate()
    sequence.advance(material.prefix)
    return Prefilled(cache, sequence, 0, 0, 0.0)


def let_go() -> None:
    """Give back the pool of the trial before: caches and sequences refer to each other, so only the collector does."""
    gc.collect()
    mx.clear_cache()


def window(setup: Setup, filled: Prefilled, tokens: Sequence[int], passes: int = 1) -> mx.array:
    """Logits [positions, vocab] of `tokens` behind the sequence, as a prefill chunk (or `passes` of them); advances
    it."""
    size, outs = -(-len(tokens) // passes), []
    for at in range(0, len(tokens), size):
        part = tokens[at : at + size]
        outs.append(_pass(setup, filled.cache, filled.sequence, part))
        filled.sequence.advance(part)
    return outs[0] if len(outs) == 1 else mx.concatenate(outs)


def recalled(setup: Setup, filled: Prefilled, probe: Probe) -> bool:
    """Whether every token of the needle's answer is the most likely one, each behind the right ones before it."""
    twin = filled.sequence.fork()
    try:
        out = _pass(setup, filled.cache, twin, probe.ids)
        rows = out[-probe.answer - 1 : -1]
        expected = mx.array(probe.ids[-probe.answer :])
        found: Any = mx.all(mx.argmax(rows, axis=-1) == expected).item()
        return bool(found)
    finally:
        twin.close()


def answer(setup: Setup, filled: Prefilled, questions: Sequence[Sequence[int]]) -> tuple[list[list[int]], float]:
    """Greedy answers to all questions, decoded together over the shared prefix, and the seconds from the end of the
    prefill to the first question's first token."""
    cache = filled.cache
    twins = [filled.sequence.fork() for _ in questions]
    try:
        began, first_s = time.perf_counter(), 0.0
        last: list[int] = []
        for twin, ids in zip(twins, questions, strict=True):
            last.append(_top(_pass(setup, cache, twin, ids)[-1:])[0])
            twin.advance(ids)
            first_s = first_s or time.perf_counter() - began
        answers = [[token] for token in last]
        for _ in range(ANSWER - 1):
            live = [i for i, ids in enumerate(answers) if ids[-1] not in setup.stops]
            if not live:
                break
            for i in live:
                twins[i].reserve(1)
            out = forward(setup.model, cache, [(twins[i], [answers[i][-1]]) for i in live])
            assert out is not None
            tops = _top(out)
            setup.tick()
            for i, token in zip(live, tops, strict=True):
                twins[i].advance([answers[i][-1]])
                answers[i].append(token)
        return answers, first_s
    finally:
        for twin in twins:
            twin.close()


def _open(setup: Setup, layout: KVLayout, material: Material, paths: Paths) -> tuple[PagedCache, CachedSequence]:
    blocks = -(-material.tokens // setup.block)
    spare = SPARE_BLOCKS * max(len(material.questions), 1)
    cache = PagedCache(layout, setup.block, blocks + spare, initial_blocks=blocks, namespace=SPACE)
    cache.paths = paths
    return cache, cache.open([], None, expected_rows=material.tokens)


def _pass(setup: Setup, cache: PagedCache, sequence: CachedSequence, tokens: Sequence[int]) -> mx.array:
    """Logits of every token, not of the last one only as `forward` gives them."""
    sequence.reserve(len(tokens))
    step = plan_step(cache, [sequence], len(tokens), discard_last=False)
    out: mx.array = setup.model(mx.array([list(tokens)]), cache=cache.layer_caches(step))[0]
    mx.eval(out)
    setup.tick()
    return out


def _top(logits: mx.array) -> list[int]:
    found: Any = mx.argmax(logits, axis=-1).tolist()
    return [int(token) for token in found]


def _starts(found: Sequence[Any]) -> list[int]:
    starts, at = [], 0
    for piece in found:
        starts.append(at)
        at += piece.rows
    return starts
