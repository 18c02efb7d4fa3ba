"""Quantised pools: what a hit gives is what computing it again gives, and the bytes are those of the formula."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import QuantizedKVCache

from kvd.cache.paths import Paths
from tests.cache.support import (
    BLOCK,
    ask,
    finish,
    model,
    near,
    new_cache,
    prefill,
    prompt,
    same,
    step,
    step_batch,
    stock_logits,
)
from tests.cache.test_landing import restore, stored

PRESETS = ["k8v8", "k8v4", "k4v4", "k6v4", {"k": "8g32", "v": "4g32", "layers": {"0": {"k": "native"}, "-1": {"v": 8}}}]
PATHS = [Paths(), Paths(table_from=1), Paths(table=False), Paths(chunked_from=1)]


@pytest.mark.parametrize("kv", PRESETS, ids=str)
@pytest.mark.parametrize("paths", PATHS, ids=["view", "table", "pieces", "chunked"])
def test_a_hit_gives_the_bits_of_the_cold_pass(kv, paths):
    net = model()
    for length in (BLOCK + 1, 4 * BLOCK + 3):
        tokens = prompt(length)
        cache = new_cache(net, kv=kv)
        cache.paths = paths
        cold, sequence, _ = ask(net, cache, tokens)
        finish(sequence)
        warm, sequence, computed = ask(net, cache, tokens)
        assert computed == 1
        assert same(cold, warm)


@pytest.mark.parametrize("kv", PRESETS, ids=str)
def test_restored_blocks_give_the_bits_of_the_cold_pass(kv, monkeypatch):
    net = model()
    tokens = prompt(4 * BLOCK + 3)
    cold, _, _ = ask(net, new_cache(net, kv=kv), tokens)
    monkeypatch.setattr("tests.cache.test_landing.new_cache", lambda net: new_cache(net, kv=kv))
    monkeypatch.setattr("tests.cache.test_landing.prefill", lambda *given, chunk: prefill(*given))
    blocks = stored(net, tokens[:-1])
    cache = new_cache(net, kv=kv)
    sequence = cache.open(tokens, None)
    restore(cache, sequence, blocks)
    assert sequence.rows == len(tokens) - 1
    assert near(step(net, cache, sequence, tokens[-1]), cold)


@pytest.mark.parametrize("bits", [8, 4])
def test_results_are_those_of_mlx_lms_quantised_cache(bits):
    net = model()
    tokens = prompt(40)
    caches = [QuantizedKVCache(32, bits) for _ in net.layers]
    net(mx.array([tokens[:-1]]), cache=caches)
    expected = net(mx.array([tokens[-1:]]), cache=caches)[:, -1, :]
    got, sequence, _ = ask(net, new_cache(net, kv=f"k{bits}v{bits}g32"), tokens)
    assert near(got, expected)


def test_eight_bits_are_close_to_native_and_four_are_further():
    net = model()
    tokens = prompt(60)
    exact = stock_logits(net, tokens)
    errors = []
    for kv in ("k8v8", "k8v4", "k4v4"):
        got, _, _ = ask(net, new_cache(net, kv=kv), tokens)
        errors.append(mx.abs(got - exact).max().item())
    assert 0 < errors[0] < errors[1] < errors[2] < 10


def test_batches_of_shared_and_own_prefixes_decode_quantised():
    net = model()
    cache = new_cache(net, kv="k8v4")
    shared = prompt(3 * BLOCK)
    prompts = [shared + [1, 2], shared + [3], prompt(19, seed=3)]
    sequences = [ask(net, cache, tokens)[1] for tokens in prompts]
    out = step_batch(net, cache, sequences, [5, 6, 7])
    for i, tokens in enumerate(prompts):
        alone, _, _ = ask(net, new_cache(net, kv="k8v4"), tokens + [5 + i])
        assert near(out[i : i + 1], alone)


@pytest.mark.parametrize(("kv", "per_head"), [("native", 256), ("k8v8g32", 80), ("k8v4g32", 64), ("k4v4g32", 48)])
def test_bytes_of_the_pool_are_those_of_the_formula(kv, per_head):
    """per_head: 32 elements of K and of V, words and float32 scales and biases."""
    net = model()
    cache = new_cache(net, kv=kv)
    assert cache.layout.bytes_per_token() == per_head * 2 * 2
    stats = cache.stats
    assert stats.bytes_pool == stats.blocks_total * BLOCK * stats.bytes_per_token
    assert sum(array.nbytes for array in cache.pool.arrays) == stats.bytes_pool
