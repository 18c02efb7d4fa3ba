"""How one forward pass reads and writes the pool, chosen by the shape of its batch.

run     one sequence in one run: zero-copy views, the model's own fused attention
gather  one sequence in several runs: its runs are put together per layer, for this pass only
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from kvd.cache.plugin import Step
from kvd.cache.pool import KVPool, Parts

if TYPE_CHECKING:
    from kvd.cache.paged import PagedCache
    from kvd.cache.sequence import CachedSequence


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [start, stop) of the pool."""

    start: int
    stop: int


def pieces(runs: Sequence[tuple[int, int]], block_size: int, first: int, stop: int) -> list[Piece]:
    """Where rows [first, stop) of a sequence lie, in order. runs: (first row in the pool, blocks)."""
    found: list[Piece] = []
    at = 0
    for start, blocks in runs:
        length = blocks * block_size
        low, high = max(first, at), min(stop, at + length)
        if low < high:
            found.append(Piece(start + low - at, start + high - at))
        at += length
    return found


def plan_step(cache: PagedCache, sequences: Sequence[CachedSequence], count: int, discard_last: bool) -> Step:
    """count: new tokens per sequence."""
    if len(sequences) > 1:
        raise NotImplementedError("batches")
    sequence = sequences[0]
    if discard_last:
        assert count == 1 and sequence.rows >= 1
        offset, stop = sequence.rows - 1, sequence.rows
        written: list[Piece] = []
    else:
        offset, stop = sequence.rows, sequence.rows + count
        written = pieces(sequence.runs(), cache.block_size, offset, stop)
        assert sum(piece.stop - piece.start for piece in written) == count, "rows were not reserved"
    return SingleStep(cache.pool, offset, written, pieces(sequence.runs(), cache.block_size, 0, stop))


class SingleStep:
    """One sequence. Plain arrays: a view of its run, or its runs put together."""

    opaque = False

    def __init__(self, pool: KVPool, offset: int, written: list[Piece], read: list[Piece]) -> None:
        self.pool = pool
        self.offset: int | mx.array = offset
        self.written = written
        self.read = read

    def fetch(self, layer: int, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        k, v = self.pool.k[layer], self.pool.v[layer]
        self._write(k[0], keys)
        self._write(v[0], values)
        return self._view(k), self._view(v)

    def _write(self, array: mx.array, rows: mx.array) -> None:
        at = 0
        for piece in self.written:
            n = piece.stop - piece.start
            array[..., piece.start : piece.stop, :] = rows[..., at : at + n, :] if len(self.written) > 1 else rows
            at += n

    def _view(self, parts: Parts) -> mx.array:
        array = parts[0]
        if len(self.read) == 1:
            return array[..., self.read[0].start : self.read[0].stop, :]
        return mx.concatenate([array[..., piece.start : piece.stop, :] for piece in self.read], axis=-2)
