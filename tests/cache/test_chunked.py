"""Chunks attend as MLX's own attention does, with bits that do not depend on how a prompt is cut."""

from __future__ import annotations

import mlx.core as mx
import pytest

from kvd.cache.chunked import ROWS, attend_chunk


def parts(offset: int, n: int, heads: int = 6, kv_heads: int = 2, dim: int = 32) -> tuple[mx.array, mx.array, mx.array]:
    shapes = ((1, heads, n, dim), (1, kv_heads, offset + n, dim), (1, kv_heads, offset + n, dim))
    q, k, v = (mx.random.normal(shape, key=mx.random.key(i)) for i, shape in enumerate(shapes))
    return q, k, v


@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (8, 1)])
@pytest.mark.parametrize(("offset", "n"), [(0, 2), (0, 64), (9, 70), (64, 64), (100, 200), (1000, 130)])
def test_a_chunk_gives_mlx_s_causal_attention(heads: tuple[int, int], offset: int, n: int) -> None:
    q, k, v = parts(offset, n, *heads)
    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.2, mask="causal")
    got = attend_chunk(q, k, v, 0.2, offset)
    assert got.shape == expected.shape
    assert mx.abs(got - expected).max().item() < 2e-6


def test_large_scores_neither_overflow_nor_vanish() -> None:
    q, k, v = parts(64, 64)
    got = attend_chunk(q * 100, k, v, 1.0, 64)
    assert mx.all(mx.isfinite(got)).item()
    expected = mx.fast.scaled_dot_product_attention(q * 100, k, v, scale=1.0, mask="causal")
    assert mx.abs(got - expected).max().item() < 1e-3


@pytest.mark.parametrize("cut", [ROWS, 3 * ROWS])
def test_a_row_has_the_same_bits_however_its_prompt_is_cut(cut: int) -> None:
    q, k, v = parts(2 * ROWS, 5 * ROWS)
    whole = attend_chunk(q, k, v, 0.2, 2 * ROWS)
    end = 2 * ROWS + cut
    first = attend_chunk(q[:, :, :cut], k[:, :, :end], v[:, :, :end], 0.2, 2 * ROWS)
    second = attend_chunk(q[:, :, cut:], k, v, 0.2, end)
    assert mx.array_equal(mx.concatenate([first, second], axis=2), whole).item()


def test_the_pool_s_views_are_left_as_they_are() -> None:
    q, k, v = parts(10, 20)
    before = (mx.array(q), mx.array(k), mx.array(v))
    mx.eval(before)
    mx.eval(attend_chunk(q, k, v, 0.2, 10))
    assert all(mx.array_equal(a, b).item() for a, b in zip((q, k, v), before, strict=True))
