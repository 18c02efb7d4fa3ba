"""The polynomial softmax is as exact as mlx's."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from kvd.cache.softmax import FEWEST, NUMPY_FROM, exponential, softmax_parts


def test_exponentials_are_right_to_the_last_places():
    x = np.concatenate([-np.logspace(-9, 1.93, 4000), [0.0]]).astype(np.float32)
    got = np.array(exponential(mx.array(x)))
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(got / exact - 1) < 1.3e-7 * (1 + np.abs(x))).all()
    far = np.array(exponential(mx.array([-200.0, -np.inf, -1e30])))
    assert (far >= 0).all() and (far < 2e-38).all()


@pytest.mark.parametrize("columns", [3, FEWEST, 3 * FEWEST + 1, NUMPY_FROM])
def test_weights_are_those_of_mlx(columns):
    scores = mx.random.normal((2, 3, columns), key=mx.random.key(0)) * 5
    scores[..., 1] = -mx.inf
    weights, total = softmax_parts(scores)
    got = weights if total is None else weights / total
    assert mx.abs(got - mx.softmax(scores, axis=-1)).max().item() < 1e-6
    assert (total is None) == (scores.size < FEWEST)


def test_half_precision_is_left_to_mlx():
    scores = mx.zeros((1, FEWEST), mx.float16)
    weights, total = softmax_parts(scores)
    assert total is None and weights.dtype == mx.float16
