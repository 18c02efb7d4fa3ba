"""Divergences against numpy in float64."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from kvd.calibrate.compare import NotFinite, Reference

ROWS, VOCAB = 150, 40


def logits(seed: int, near: np.ndarray | None = None, by: float = 0.0) -> np.ndarray:
    noise = np.random.default_rng(seed).standard_normal((ROWS, VOCAB)).astype(np.float32)
    return 3 * noise if near is None else near + by * noise


def logs(values: np.ndarray) -> np.ndarray:
    wide = values.astype(np.float64)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def test_the_same_logits_have_no_divergence() -> None:
    native = mx.array(logits(1))
    found = Reference.of(native, [i % VOCAB for i in range(ROWS)], 3).quality(native)
    assert (found.kld_mean, found.kld_p99, found.same_top, found.perplexity_ratio) == (0.0, 0.0, 1.0, 1.0)


@pytest.mark.parametrize("following", [None, 7])
def test_figures_are_those_of_a_plain_computation(following: int | None) -> None:
    native = logits(1)
    other = logits(2, native, 0.7)
    tokens = [(7 * i) % VOCAB for i in range(ROWS)]
    found = Reference.of(mx.array(native), tokens, following).quality(mx.array(other))
    p, q = logs(native), logs(other)
    kl = (np.exp(p) * (p - q)).sum(axis=-1)
    targets = tokens[1:] + ([] if following is None else [following])
    at = np.arange(len(targets))
    ratio = math.exp((p[at, targets] - q[at, targets]).mean())
    assert found.kld_mean == pytest.approx(kl.mean(), rel=1e-4)
    assert found.kld_p99 == pytest.approx(np.sort(kl)[int(0.99 * ROWS)], rel=1e-4)
    assert found.same_top == (p.argmax(axis=-1) == q.argmax(axis=-1)).mean()
    assert found.perplexity_ratio == pytest.approx(ratio, rel=1e-4)


def test_half_precision_logits_are_compared_in_float32() -> None:
    native = mx.array(logits(1)).astype(mx.float16)
    reference = Reference.of(native, [i % VOCAB for i in range(ROWS)], None)
    assert reference.logprobs.dtype == mx.float32
    assert reference.quality(native).kld_mean == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_no_small_divergence(bad: float) -> None:
    native, broken = mx.array(logits(1)), mx.array(logits(1))
    broken[70, 3] = bad
    reference = Reference.of(native, [i % VOCAB for i in range(ROWS)], None)
    with pytest.raises(NotFinite):
        reference.quality(broken)
    with pytest.raises(NotFinite):
        Reference.of(broken, [i % VOCAB for i in range(ROWS)], None)


def test_the_last_positions_are_the_last_ones() -> None:
    native, other = logits(1), logits(2, logits(1), 0.5)
    tokens = [(3 * i) % VOCAB for i in range(ROWS)]
    part = Reference.of(mx.array(native), tokens, 5).last(20).quality(mx.array(other[-20:]))
    whole = Reference.of(mx.array(native[-20:]), tokens[-20:], 5).quality(mx.array(other[-20:]))
    assert part == whole
