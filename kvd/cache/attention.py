"""Attention over the pool in portable mlx operations, for native and quantised sides alike.

Shapes: queries [rows, heads, 1, head_dim]; grouped queries [rows, kv_heads, repeats, head_dim]. Softmax runs in float32
over the scores of all pieces at once, so taking K and V apart changes a result by rounding only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from kvd.cache.plan import Bundle, Piece
from kvd.cache.side import Side
from kvd.cache.softmax import softmax_parts


@dataclass(frozen=True, slots=True)
class PagedTails:
    """Own rows of several batch rows, in pieces of `grain` rows of the pool, padded to the longest."""

    grains: mx.array
    """[rows, n]: which pieces"""
    mask: mx.array
    """[1, 1, rows, 1, n * grain] additive float32"""
    grain: int
    tables: dict[tuple[int, int], mx.array]
    """`table` by its arguments: the same for all layers of a kind"""

    @staticmethod
    def of(bundle: Bundle, block_size: int, grain: int | None = None) -> PagedTails | None:
        """None where the bundle has no tails. grain: a divisor of the block size (default: whole blocks)."""
        size = grain or block_size
        per = block_size // size
        longest = max((-(-rows // size) for rows in bundle.lengths), default=0)
        if not longest:
            return None
        padded = []
        for tail, rows in zip(bundle.tails, bundle.lengths, strict=True):
            used = [tail[i // per] * per + i % per for i in range(-(-rows // size))]
            padded.append(used + [used[-1]] * (longest - len(used)))
        valid = mx.arange(longest * size)[None] < mx.array(bundle.lengths)[:, None]
        mask = mx.where(valid, 0.0, -mx.inf).astype(mx.float32)
        return PagedTails(mx.array(padded, dtype=mx.uint32), mask[None, None, :, None, :], size, {})

    def table(self, kv_heads: int, pool_rows: int) -> mx.array:
        """Indices into the pool seen as [kv_heads * pieces, grain, width]: [rows, n, kv_heads]."""
        known = self.tables.get((kv_heads, pool_rows))
        if known is None:
            heads = mx.arange(kv_heads, dtype=mx.uint32) * (pool_rows // self.grain)
            known = self.tables[kv_heads, pool_rows] = self.grains[..., None] + heads
        return known


def attend_bundle(
    queries: mx.array, k: Side, v: Side, shared: Sequence[Piece], tails: PagedTails | None, scale: float
) -> mx.array:
    """Rows that share `shared`, each with its own tail: [rows, heads, 1, dim] -> [rows, heads, 1, v_dim].

    The rows are folded into the M dimension of one product per shared piece; the tails are read through the block
    table; one softmax goes over all scores.
    """
    rows, heads, _, dim = queries.shape
    kv_heads, pool_rows = k.parts[0].shape[1], k.parts[0].shape[2]
    repeats = heads // kv_heads
    grouped = (queries * scale).reshape(rows, kv_heads, repeats, dim)
    folded = grouped.transpose(1, 0, 2, 3).reshape(1, kv_heads, rows * repeats, dim)
    scores = [k.scores(folded, piece) for piece in shared]
    table = None
    if tails is not None:
        table = tails.table(kv_heads, pool_rows)
        own = k.paged_scores(grouped[:, None], table, tails.grain)
        scores.append(_to_columns(own, rows, kv_heads, repeats, tails.mask))
    joined = scores[0] if len(scores) == 1 else mx.concatenate(scores, axis=-1)
    weights, total = softmax_parts(joined)
    out: mx.array | None = None
    at = 0
    for piece in shared:
        part = v.mix(weights[..., at : at + piece.rows], piece)
        out = part if out is None else out + part
        at += piece.rows
    result = None if out is None else _rows_first(out, rows, kv_heads, repeats)
    if tails is not None and table is not None:
        columns = _to_pieces(weights[..., at:], rows, kv_heads, repeats, tails.grain)
        mixed = v.paged_mix(columns, table, tails.grain).sum(axis=1)
        result = mixed if result is None else result + mixed
    assert result is not None
    if total is not None:
        result = result / _rows_first(total, rows, kv_heads, repeats)
    return result.reshape(rows, heads, 1, result.shape[-1])


def attend_view(queries: mx.array, k: Side, v: Side, piece: Piece, scale: float) -> mx.array:
    """One row over one native run: mlx's fused attention on a zero-copy view."""
    return mx.fast.scaled_dot_product_attention(queries, k.plain(piece), v.plain(piece), scale=scale)


def _to_columns(own: mx.array, rows: int, kv_heads: int, repeats: int, mask: mx.array) -> mx.array:
    """[rows, n, kv_heads, G, B] -> [1, kv_heads, rows * G, n * B], masked."""
    moved = own.transpose(2, 0, 3, 1, 4).reshape(1, kv_heads, rows, repeats, -1)
    masked = moved + mask.astype(own.dtype)
    return masked.reshape(1, kv_heads, rows * repeats, -1)


def _to_pieces(weights: mx.array, rows: int, kv_heads: int, repeats: int, grain: int) -> mx.array:
    """Inverse of `_to_columns`."""
    return weights.reshape(kv_heads, rows, repeats, -1, grain).transpose(1, 3, 0, 2, 4)


def _rows_first(out: mx.array, rows: int, kv_heads: int, repeats: int) -> mx.array:
    """[1, kv_heads, rows * G, dim] -> [rows, kv_heads, G, dim]."""
    return out.reshape(kv_heads, rows, repeats, -1).transpose(1, 0, 2, 3)

