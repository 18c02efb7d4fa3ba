"""A pass over rows that come while it runs gives what it gives when they were there before."""

from __future__ import annotations

from itertools import accumulate

import pytest

from kvd.cache.ahead import outlook
from kvd.cache.hostmem import address
from kvd.cache.paged import forward
from tests.cache.support import (
    BLOCK,
    ask,
    fill,
    model,
    new_cache,
    prefill,
    prompt,
    same,
    saved,
    step,
    stock_logits,
)  # fmt: skip

LAYERS = 5


def stored(net, tokens, kv):
    """(tokens, chain, parent, bytes) of every block of a prompt."""
    cache = new_cache(net, kv=kv)
    _, sequence, _ = ask(net, cache, tokens)
    sequence.tail()
    match = cache.match(tokens)
    found = []
    for entry in [*match.blocks, *([match.child] if match.child else [])]:
        found.append((entry.tokens, entry.chain, entry.parent, b"".join(saved(cache, entry))))
    return found


class LayerByLayer:
    """Arriving rows that are filled in when their layer is asked for, the layers behind it with garbage until then."""

    def __init__(self, cache, landings, blocks, fails_at=None):
        self.cache, self.landings, self.blocks, self.fails_at = cache, landings, blocks, fails_at
        self.waited = []
        parts = cache.layout.parts
        self.parts = [[i for i, part in enumerate(parts) if part.layer == layer] for layer in range(LAYERS)]
        self.starts = [0, *accumulate(part.nbytes(1) for part in parts)]
        for landing, (tokens, _, _, source) in zip(landings, blocks, strict=True):
            fill(landing, [b"\xff" * len(source)], len(tokens))

    def there(self, layer):
        return layer in self.waited

    def wait(self, layer):
        if layer == self.fails_at:
            raise LookupError(layer)
        which = slice(self.parts[layer][0], self.parts[layer][-1] + 1)
        for landing, (tokens, _, _, source) in zip(self.landings, self.blocks, strict=True):
            first, stop = (self.starts[at] * len(tokens) for at in (which.start, which.stop))
            fill(landing, [source[first:stop]], len(tokens), which)
            landing.settle(len(tokens), which)
        self.waited.append(layer)


def accept(landings, blocks, used=None, overwritten=False):
    for at, (landing, (tokens, chain, parent, _)) in enumerate(zip(landings, blocks, strict=True)):
        last = at == len(blocks) - 1
        landing.accept(tokens, chain, parent, used=used if last else None, overwritten=overwritten and last)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kv", ["native", "k8v8"])
@pytest.mark.parametrize("kept", [3 * BLOCK, 3 * BLOCK - 3])
@pytest.mark.parametrize("new", [1, 30])
def test_rows_that_come_layer_by_layer(family, kv, kept, new, addressable):
    net = model(family, layers=LAYERS, head_dim=64)
    first = prompt(3 * BLOCK)
    blocks = stored(net, first, kv)
    tokens = first[:kept] + prompt(new, seed=5)
    expected = ask(net, new_cache(net, kv=kv), tokens)[0]
    cache = new_cache(net, kv=kv)
    sequence = cache.open(tokens, None, expected_rows=len(tokens))
    landings = sequence.landing(len(blocks))
    where = [address(array) for array in cache.pool.arrays]
    arriving = LayerByLayer(cache, landings, blocks)
    if new == 1:
        got = forward(net, cache, [(outlook(sequence, kept, 1), tokens[kept:])], arriving=arriving)
    else:
        seen = outlook(sequence, kept, new - 1)
        got = forward(net, cache, [(seen, tokens[kept:-1])], logits=False, arriving=arriving)
    assert arriving.waited == list(range(LAYERS))
    accept(landings, blocks, used=kept - 2 * BLOCK, overwritten=kept < 3 * BLOCK)
    sequence.advance(tokens[kept : kept + max(new - 1, 1)])
    if new > 1:
        assert got is None
        got = step(net, cache, sequence, tokens[-1])
    assert same(got, expected)
    assert [address(array) for array in cache.pool.arrays] == where  # updated in place
    sequence.tail()
    assert cache.match(tokens).rows == len(tokens)
    assert cache.match(first).rows == (3 * BLOCK if kept == 3 * BLOCK else kept)


def test_the_last_row_over_stored_rows_that_still_come(addressable):
    net = model(layers=LAYERS)
    first = prompt(3 * BLOCK)
    blocks = stored(net, first, "native")
    tokens = first[:-3]
    cache = new_cache(net)
    sequence = cache.open(tokens, None)
    landings = sequence.landing(3)
    seen = outlook(sequence, len(tokens), 0)
    got = forward(
        net, cache, [(seen, tokens[-1:])], discard_last=True, arriving=LayerByLayer(cache, landings, blocks)
    )
    assert same(got, stock_logits(net, tokens))
    accept(landings, blocks, used=BLOCK - 3)
    assert sequence.rows == len(tokens)
    assert cache.match(first).rows == 3 * BLOCK  # nothing was written over the rest of the block


@pytest.mark.parametrize("fails_at", range(LAYERS))
def test_a_pass_that_a_layer_did_not_come_for_leaves_no_trace(fails_at, addressable):
    net = model(layers=LAYERS)
    first = prompt(3 * BLOCK)
    blocks = stored(net, first, "native")
    tokens = first + prompt(20, seed=6)
    cache = new_cache(net)
    sequence = cache.open(tokens, None)
    landings = sequence.landing(3)
    where = [address(array) for array in cache.pool.arrays]
    arriving = LayerByLayer(cache, landings, blocks, fails_at)
    with pytest.raises(LookupError):
        forward(net, cache, [(outlook(sequence, 3 * BLOCK, 19), tokens[3 * BLOCK : -1])], arriving=arriving)
    assert cache.match(tokens).rows == 0
    for landing in landings:
        landing.reject()
    assert sequence.rows == 0
    prefill(net, cache, sequence, tokens[:-1])
    assert same(step(net, cache, sequence, tokens[-1]), stock_logits(net, tokens))
    assert [address(array) for array in cache.pool.arrays] == where


def test_capacity_behind_what_lands_is_kept_or_given_back_with_it():
    net = model(layers=LAYERS)
    blocks = stored(net, prompt(2 * BLOCK), "native")
    cache = new_cache(net, blocks=8)
    for good in (True, False):
        sequence = cache.open([], None)
        landings = sequence.landing(2)
        assert outlook(sequence, 2 * BLOCK, 20).block_table == sequence.block_table
        assert len(sequence.block_table) == 5
        if good:
            for landing, (_, _, _, source) in zip(landings, blocks, strict=True):
                fill(landing, [source])
            accept(landings, blocks)
        else:
            for landing in landings:
                landing.reject()
        assert (sequence.rows, len(sequence.block_table)) == ((2 * BLOCK, 5) if good else (0, 0))
        sequence.close()
        assert cache.stats.blocks_live == 0


def test_buffers_that_the_pool_has_outgrown_are_not_usable():
    net = model(layers=LAYERS)
    cache = new_cache(net, blocks=64, initial=2)
    sequence = cache.open([], None)
    landing = sequence.landing(1)[0]
    assert landing.usable
    ask(net, cache, prompt(5 * BLOCK))
    assert not landing.usable
