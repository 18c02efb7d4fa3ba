"""Promise 1: a hit gives the logits that mlx-lm's own cache gives, bit for bit under the reference BLAS."""

from __future__ import annotations

import threading

import mlx.core as mx
import pytest

from kvd.cache.hostmem import address
from kvd.cache.paged import forward
from tests.cache.support import BLOCK, ask, finish, model, near, new_cache, prefill, prompt, same, step, stock_logits

LENGTHS = [2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 5, 10 * BLOCK + 3]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("length", LENGTHS)
def test_cold_and_repeated_prompts_give_the_stock_logits(family, length):
    net = model(family)
    cache = new_cache(net)
    tokens = prompt(length)
    expected = stock_logits(net, tokens)
    cold, sequence, computed = ask(net, cache, tokens)
    assert same(cold, expected)
    assert computed == length
    finish(sequence)
    for _ in range(2):
        warm, sequence, computed = ask(net, cache, tokens)
        assert computed == 1
        assert same(warm, expected)
        finish(sequence)


@pytest.mark.parametrize("cut", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3])
def test_divergence_inside_a_block_computes_only_what_differs(cut):
    net = model()
    cache = new_cache(net)
    first = prompt(3 * BLOCK + 5)
    _, sequence, _ = ask(net, cache, first)
    finish(sequence)
    second = first[:cut] + [(first[cut] + 1) % 500] + prompt(20, seed=2)
    got, sequence, computed = ask(net, cache, second)
    assert computed == len(second) - cut
    assert same(got, stock_logits(net, second))
    finish(sequence)
    got, sequence, computed = ask(net, cache, first)
    assert computed == 1
    assert same(got, stock_logits(net, first))


def test_decoding_after_a_hit_in_the_middle_of_a_tail_stays_one_run():
    net = model()
    cache = new_cache(net)
    tokens = prompt(3 * BLOCK + 3)
    _, sequence, _ = ask(net, cache, tokens)
    answer = prompt(14, seed=3)
    for token in answer:
        step(net, cache, sequence, token)
    finish(sequence)
    got, sequence, computed = ask(net, cache, tokens)
    assert computed == 1
    other = prompt(14, seed=4)
    for token in other:
        got = step(net, cache, sequence, token)
    assert len(sequence.runs()) == 1
    assert same(got, stock_logits(net, tokens + other))
    finish(sequence)
    got, sequence, computed = ask(net, cache, tokens + answer)
    assert computed == 1
    assert same(got, stock_logits(net, tokens + answer))


def test_live_sharing_copies_only_the_tail_and_both_stay_right():
    net = model()
    cache = new_cache(net)
    tokens = prompt(3 * BLOCK + 3)
    _, first, _ = ask(net, cache, tokens)
    first.tail()
    _, second, computed = ask(net, cache, tokens)
    assert computed == 1
    ones, twos = prompt(12, seed=5), prompt(12, seed=6)
    for one, two in zip(ones, twos, strict=True):
        a, b = step(net, cache, first, one), step(net, cache, second, two)
    assert near(a, stock_logits(net, tokens + ones))
    assert near(b, stock_logits(net, tokens + twos))
    assert set(first.block_table[:3]) == set(second.block_table[:3])


def test_growth_of_the_pool_keeps_every_row():
    net = model()
    cache = new_cache(net, blocks=64, initial=1)
    tokens = prompt(20 * BLOCK)
    got, sequence, _ = ask(net, cache, tokens)
    assert same(got, stock_logits(net, tokens))
    assert 20 <= cache.stats.blocks_total <= 64


def test_a_recycled_block_never_serves_its_old_prompt():
    """F1: three blocks; A is evicted and its blocks filled by X, Y, Z; A asked again is computed again."""
    net = model()
    cache = new_cache(net, blocks=3)
    a = prompt(2 * BLOCK + 3)
    cold, sequence, _ = ask(net, cache, a)
    finish(sequence)
    for seed in (1, 2, 3):
        _, sequence, _ = ask(net, cache, prompt(2 * BLOCK + 3, seed=seed))
        finish(sequence)
    again, sequence, computed = ask(net, cache, a)
    assert computed == len(a)
    assert same(again, cold) and same(cold, stock_logits(net, a))


def test_alternating_prompts_and_branches_compute_only_their_own_suffix():
    """F16: A, B, A, B, then three branches of one tree."""
    net = model()
    cache = new_cache(net)
    trunk = prompt(2 * BLOCK + 3)
    prompts = [prompt(30, seed=1), prompt(30, seed=2), *(trunk + prompt(9, seed=s) for s in (3, 4, 5))]
    for tokens in prompts:
        finish(ask(net, cache, tokens)[1])
    for _ in range(2):
        for tokens in prompts:
            got, sequence, computed = ask(net, cache, tokens)
            assert computed == 1
            assert same(got, stock_logits(net, tokens))
            for i in range(BLOCK):
                step(net, cache, sequence, i)
            finish(sequence)


def test_a_chunk_that_fails_half_way_leaves_no_trace(monkeypatch):
    """F7: an error inside a layer; the retry, and what others see meanwhile, equal cold."""
    net = model()
    cache = new_cache(net)
    tokens = prompt(40)
    sequence = cache.open(tokens, None)
    prefill(net, cache, sequence, tokens[:16])
    layer = type(net.layers[1])
    original = layer.__call__

    def failing(self, x, *given, **named):
        if self is net.layers[1]:
            raise RuntimeError("a kernel failed")
        return original(self, x, *given, **named)

    monkeypatch.setattr(layer, "__call__", failing)
    with pytest.raises(RuntimeError):
        prefill(net, cache, sequence, tokens[:-1])
    monkeypatch.setattr(layer, "__call__", original)
    assert sequence.rows == 16 and cache.match(tokens).rows == 16
    prefill(net, cache, sequence, tokens[:-1])
    assert same(step(net, cache, sequence, tokens[-1]), stock_logits(net, tokens))
    finish(sequence)
    assert same(ask(net, cache, tokens)[0], stock_logits(net, tokens))


@pytest.mark.parametrize("kv", ["native", "k8v8"])
def test_others_decode_between_the_layers_of_a_chunk_and_both_get_what_they_get_one_after_the_other(kv):
    net = model(layers=6, head_dim=64)
    tokens, question, said = prompt(80), prompt(2 * BLOCK, seed=7), prompt(5, seed=8)
    expected = []
    for together in (False, True):
        cache = new_cache(net, kv=kv)
        _, stream, _ = ask(net, cache, question)
        stream.reserve(len(said))
        long = cache.open(tokens, None, expected_rows=len(tokens))
        long.reserve(len(tokens) - 1)
        before = [address(array) for array in cache.pool.arrays]
        steps = iter(said)
        taken = []

        def pause(steps=steps, taken=taken, cache=cache, stream=stream):
            taken.append(step(net, cache, stream, next(steps)))

        forward(net, cache, [(long, tokens[:-1])], logits=False, pause=pause if together else None)
        long.advance(tokens[:-1])
        if not together:
            for _ in said:
                pause()
        assert [address(array) for array in cache.pool.arrays] == before  # updated in place
        expected.append(mx.concatenate([*taken, step(net, cache, long, tokens[-1])]))
    assert len(taken) == 5
    assert same(*expected)


def test_the_cache_belongs_to_one_thread():
    cache = new_cache(model())
    caught = []

    def use():
        try:
            cache.match([1])
        except AssertionError as error:
            caught.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(30)
    assert len(caught) == 1
