"""The facade: counts that add up, blocks that are forgotten on request, and bytes only while they are there."""

from __future__ import annotations

import pytest

from kvd.cache.chain import namespace
from kvd.cache.results import Consent, PoolFull
from tests.cache.support import BLOCK, SPACE, ask, finish, model, new_cache, prefill, prompt, same, step, stock_logits

OTHER = namespace({"test": 2})


def counts(cache):
    stats = cache.stats
    assert stats.blocks_total == stats.blocks_free + stats.blocks_cached + stats.blocks_live
    assert stats.bytes_live == stats.blocks_live * BLOCK * stats.bytes_per_token
    return stats.blocks_free, stats.blocks_cached, stats.blocks_live


def test_counts_follow_a_sequence_from_open_to_eviction():
    net = model()
    cache = new_cache(net, blocks=6)
    assert counts(cache) == (6, 0, 0)
    _, sequence, _ = ask(net, cache, prompt(2 * BLOCK + 3))
    assert counts(cache) == (3, 0, 3) and cache.stats.sequences == 1
    finish(sequence)
    assert counts(cache) == (3, 3, 0) and cache.stats.sequences == 0
    _, sequence, _ = ask(net, cache, prompt(5 * BLOCK, seed=1))
    assert counts(cache) == (0, 1, 5)
    assert cache.stats.evictions == {"capacity": 2}


def test_clear_forgets_one_tenant_and_leaves_what_is_live():
    net = model()
    cache = new_cache(net)
    tokens = prompt(2 * BLOCK)
    finish(ask(net, cache, tokens, OTHER)[1])
    _, live, _ = ask(net, cache, tokens)
    assert cache.clear(OTHER) == 2
    assert cache.match(tokens, OTHER).rows == 0 and cache.match(tokens).rows == 2 * BLOCK
    assert cache.clear() == 0
    finish(live)
    assert cache.clear() == 2 and cache.stats.evictions == {"cleared": 4}


def test_tenants_never_see_each_others_prompts():
    net = model()
    cache = new_cache(net)
    tokens = prompt(3 * BLOCK)
    finish(ask(net, cache, tokens)[1])
    assert cache.match(tokens, OTHER).rows == 0
    got, _, computed = ask(net, cache, tokens, OTHER)
    assert computed == len(tokens) and same(got, stock_logits(net, tokens))


def test_bytes_of_a_block_that_is_gone_are_not_to_be_had():
    net = model()
    cache = new_cache(net, blocks=2)
    sequence = cache.open([], None)
    sequence.reserve(BLOCK)
    prefill(net, cache, sequence, prompt(BLOCK - 1))
    published = sequence.tail()
    sequence.close()
    cache.clear()
    assert cache.host_rows(published) is None


def test_a_handle_may_be_released_twice_and_after_the_sequence():
    net = model()
    cache = new_cache(net)
    tokens = prompt(BLOCK)
    sequence = cache.open(tokens, None)
    sequence.reserve(BLOCK)
    prefill(net, cache, sequence, tokens[:-1])
    step(net, cache, sequence, tokens[-1])
    entry = cache.match(tokens).blocks[0]
    handle = cache.host_rows(type("P", (), {"entry": entry})())
    sequence.close()
    assert cache.stats.blocks_live == 1
    handle.release()
    handle.release()
    assert counts(cache) == (63, 1, 0)


def test_a_match_that_lost_blocks_meanwhile_opens_shorter():
    net = model()
    cache = new_cache(net, blocks=4)
    tokens = prompt(3 * BLOCK)
    finish(ask(net, cache, tokens)[1])
    match = cache.match(tokens)
    _, other, _ = ask(net, cache, prompt(2 * BLOCK, seed=5), OTHER)
    other.close()
    sequence = cache.open(tokens, match)
    assert 0 < sequence.rows < match.rows and sequence.tokens == tokens[: sequence.rows]
    prefill(net, cache, sequence, tokens)
    assert cache.match(tokens, SPACE).rows == len(tokens)


def test_a_request_beyond_the_pool_is_refused_before_anything_moves():
    net = model()
    asked = []
    cache = new_cache(net, blocks=8, initial=2, on_bytes=lambda n, needed: asked.append(n) or Consent.YES)
    sequence = cache.open([], None, expected_rows=9 * BLOCK)
    with pytest.raises(PoolFull) as caught:
        sequence.reserve(9 * BLOCK)
    assert (caught.value.needed, caught.value.free) == (9, 8)
    assert cache.stats.blocks_total == 2 and not asked
