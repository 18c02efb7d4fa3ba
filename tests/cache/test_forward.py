"""Promise 1: a hit gives the logits that mlx-lm's own cache gives, bit for bit under the reference BLAS."""

from __future__ import annotations

import pytest

from tests.cache.support import BLOCK, ask, finish, model, near, new_cache, prompt, same, step, stock_logits

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
