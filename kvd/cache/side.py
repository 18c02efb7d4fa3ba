"""One side (K or V) of one layer: the pool's arrays and how their rows are multiplied in place."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from kvd.cache.hostmem import on_cpu
from kvd.cache.layout import Precision
from kvd.cache.plan import Piece

Parts = tuple[mx.array, ...]
"""(rows,) native, or (words, scales, biases) quantised; each `[1, kv_heads, rows, width]`."""
DENSE_FROM = {8: (3, 8), 6: (12, 17), 5: (9, 5), 4: (3, 6), 3: (6, 4), 2: (4, 6)}
"""By bits, for scores and mix: rows on the left from which rows are dequantised first on the CPU backend, whose
quantised product does so anew for each row on the left. 2,048 rows of 3 heads of 64, 18 on the left, milliseconds:
8 bits 3.6 against 0.6 and 1.0 against 0.6, 5 bits 4.2 against 2.1 and 8.2 against 2.1."""


@dataclass(frozen=True, slots=True)
class Side:
    """Refers to the pool's array objects, which stay the same across updates; views are taken when they are used."""

    parts: Parts
    precision: Precision

    @property
    def dim(self) -> int:
        """Elements of a row."""
        width: int = self.parts[0].shape[3]
        return width if self.precision.native else width * 32 // self.precision.bits

    def view(self, piece: Piece) -> Parts:
        return tuple(part[..., piece.start : piece.stop, :] for part in self.parts)

    def plain(self, piece: Piece) -> mx.array:
        """Rows of a piece in the native type; a copy only where they are quantised."""
        return self.dequantize(self.view(piece))

    def dequantize(self, rows: Parts) -> mx.array:
        if self.precision.native:
            return rows[0]
        words, scales, biases = rows
        return mx.dequantize(words, scales, biases, group_size=self.precision.group, bits=self.precision.bits)

    def quantize(self, rows: mx.array) -> Parts:
        """Rows as the pool keeps them."""
        if self.precision.native:
            return (rows,)
        return tuple(mx.quantize(rows, group_size=self.precision.group, bits=self.precision.bits))

    def scores(self, queries: mx.array, piece: Piece) -> mx.array:
        """[1, kv_heads, M, dim] x the rows of a piece -> [1, kv_heads, M, T]."""
        return self._product(queries, self.view(piece), transpose=True)

    def mix(self, weights: mx.array, piece: Piece) -> mx.array:
        """[1, kv_heads, M, T] x the rows of a piece -> [1, kv_heads, M, dim]."""
        return self._product(weights, self.view(piece), transpose=False)

    def paged_scores(self, queries: mx.array, table: mx.array, grain: int) -> mx.array:
        """[rows, 1, kv_heads, G, dim] over the pieces of `table` [rows, n, kv_heads] -> [rows, n, kv_heads, G, grain].

        The pool is seen as [kv_heads * pieces, grain, width]; nothing is copied.
        """
        return self._gathered(queries, table, grain, transpose=True)

    def paged_mix(self, weights: mx.array, table: mx.array, grain: int) -> mx.array:
        """[rows, n, kv_heads, G, grain] over the pieces of `table` -> [rows, n, kv_heads, G, dim]."""
        return self._gathered(weights, table, grain, transpose=False)

    def _product(self, left: mx.array, rows: Parts, transpose: bool) -> mx.array:
        if self.precision.native:
            return left @ (rows[0].swapaxes(-1, -2) if transpose else rows[0])
        words, scales, biases = rows
        group, bits = self.precision.group, self.precision.bits
        if left.shape[-2] >= DENSE_FROM[bits][not transpose] and left.dtype == mx.float32 and on_cpu():
            dense = self.dequantize(rows)
            return left @ (dense.swapaxes(-1, -2) if transpose else dense)
        return mx.quantized_matmul(left, words, scales, biases, transpose=transpose, group_size=group, bits=bits)

    def _gathered(self, left: mx.array, table: mx.array, grain: int, transpose: bool) -> mx.array:
        blocks = [part.reshape(-1, grain, part.shape[-1]) for part in self.parts]
        if self.precision.native:
            right = blocks[0].swapaxes(-1, -2) if transpose else blocks[0]
            return mx.gather_mm(left, right, rhs_indices=table)
        words, scales, biases = blocks
        group, bits = self.precision.group, self.precision.bits
        return mx.gather_qmm(
            left, words, scales, biases, rhs_indices=table, transpose=transpose, group_size=group, bits=bits
        )
