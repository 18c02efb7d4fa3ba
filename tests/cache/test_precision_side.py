"""Products over quantised rows: the same whether they are dequantised first or by the product."""

from __future__ import annotations

import mlx.core as mx
import pytest

from kvd.cache.hostmem import on_cpu
from kvd.cache.layout import BITS, KVLayout, LayerKV, Precision
from kvd.cache.plan import Piece
from kvd.cache.pool import KVPool
from kvd.cache.side import DENSE_FROM

PIECE = Piece(5, 45)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("few", [True, False])
def test_products_are_those_of_the_plain_rows(monkeypatch: pytest.MonkeyPatch, bits: int, few: bool) -> None:
    precision, quantised = Precision(bits, 32), []
    pool = KVPool(KVLayout((LayerKV(2, 64, 64, precision, precision),), "float32"), 16, 4)
    side = pool.k[0]
    mx.random.seed(1)
    for array, part in zip(side.parts, side.quantize(mx.random.normal((1, 2, 64, 64))), strict=True):
        array[..., 1:, :] = part[..., 1:, :]
    real = mx.quantized_matmul
    monkeypatch.setattr(mx, "quantized_matmul", lambda *a, **o: quantised.append(1) or real(*a, **o))
    plain = side.plain(PIECE)
    for transpose, least in zip((True, False), DENSE_FROM[bits], strict=True):
        count = least - 1 if few else least
        left = mx.random.normal((1, 2, count, 64 if transpose else PIECE.rows))
        got = side.scores(left, PIECE) if transpose else side.mix(left, PIECE)
        expected = left @ (plain.swapaxes(-1, -2) if transpose else plain)
        assert mx.abs(got - expected).max().item() < 1e-4
    assert len(quantised) == (2 if few or not on_cpu() else 0)
