"""Bytes out of the pool and back into another one: the same logits as without the trip."""

from __future__ import annotations

import threading

import pytest

from kvd.cache.hostmem import address
from kvd.cache.paths import Paths
from tests.cache.support import (
    BLOCK,
    ask,
    fill,
    finish,
    model,
    near,
    new_cache,
    prefill,
    prompt,
    same,
    saved,
    step,
    stock_logits,
)  # fmt: skip


def stored(net, tokens):
    """(published, bytes) of every block of a prompt, the partial tail included."""
    cache = new_cache(net)
    sequence = cache.open(tokens, None)
    found = []
    while sequence.rows < len(tokens):
        part = tokens[sequence.rows : sequence.rows + BLOCK]
        before = sequence.rows
        prefill(net, cache, sequence, tokens[: before + len(part)], chunk=BLOCK)
    for entry in (cache.index.get(chain) for chain in sequence._chains):
        found.append(entry)
    tail = sequence.tail()
    found += [tail.entry] if tail else []
    result = []
    for entry in found:
        bytes_of = saved(cache, entry)
        assert sum(map(len, bytes_of)) == cache.layout.bytes_per_token() * len(entry.tokens)
        result.append((entry, bytes_of))
    return result


def restore(cache, sequence, blocks, used=None):
    landings = sequence.landing(len(blocks))
    threads = []
    for landing, (entry, source) in zip(landings, blocks, strict=True):
        threads.append(threading.Thread(target=fill, args=(landing, source, len(entry.tokens))))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for landing, (entry, _) in zip(landings, blocks, strict=True):
        last = landing is landings[-1]
        landing.accept(entry.tokens, entry.chain, used=used if last else None)


@pytest.mark.parametrize("length", [BLOCK, BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 5])
def test_a_restored_prompt_gives_the_stock_logits(length, addressable):
    net = model()
    tokens = prompt(length)
    blocks = stored(net, tokens)
    cache = new_cache(net)
    assert cache.pool.host_addressable == (addressable == "in place")
    sequence = cache.open(tokens, cache.match(tokens))
    restore(cache, sequence, blocks)
    assert sequence.rows == length and sequence.tokens == tokens
    finish(sequence)
    got, sequence, computed = ask(net, cache, tokens)
    assert computed == 1
    assert same(got, stock_logits(net, tokens))
    more = prompt(BLOCK + 3, seed=9)
    for token in more:
        got = step(net, cache, sequence, token)
    assert same(got, stock_logits(net, tokens + more))


def test_a_restored_child_is_used_up_to_the_divergence(addressable):
    net = model()
    tokens = prompt(3 * BLOCK)
    blocks = stored(net, tokens)
    cache = new_cache(net)
    other = tokens[: 2 * BLOCK + 3] + prompt(9, seed=7)
    sequence = cache.open(other, cache.match(other))
    restore(cache, sequence, blocks, used=3)
    assert sequence.rows == 2 * BLOCK + 3
    prefill(net, cache, sequence, other[:-1])
    assert same(step(net, cache, sequence, other[-1]), stock_logits(net, other))
    assert len(sequence.runs()) == 1
    finish(sequence)
    got, _, computed = ask(net, cache, tokens)
    assert computed == 1
    assert same(got, stock_logits(net, tokens))


def test_out_of_order_and_a_failed_block_cuts_what_follows(addressable):
    net = model()
    tokens = prompt(4 * BLOCK)
    blocks = stored(net, tokens)
    cache = new_cache(net)
    sequence = cache.open(tokens, None)
    sequence.reserve(3)
    landings = sequence.landing(4)
    assert [landing.index for landing in landings] == [0, 1, 2, 3]
    for i in (3, 0):
        entry, saved = blocks[i]
        fill(landings[i], saved, BLOCK)
        landings[i].accept(entry.tokens, entry.chain, parent=entry.parent)
    assert sequence.rows == BLOCK
    landings[1].reject()
    assert sequence.rows == BLOCK and len(sequence.block_table) == 1
    entry, saved = blocks[2]
    fill(landings[2], saved, BLOCK)
    landings[2].accept(entry.tokens, entry.chain, parent=entry.parent)
    prefill(net, cache, sequence, tokens[: 2 * BLOCK])
    finish(sequence)
    assert cache.match(tokens).rows == 4 * BLOCK
    got, _, computed = ask(net, cache, tokens)
    assert computed == 1
    assert same(got, stock_logits(net, tokens))


def test_a_chain_that_does_not_follow_is_refused():
    net = model()
    blocks = stored(net, prompt(2 * BLOCK))
    cache = new_cache(net)
    sequence = cache.open([], None)
    landing = sequence.landing(1)[0]
    with pytest.raises(ValueError):
        landing.accept(blocks[0][0].tokens, blocks[1][0].chain)
    assert sequence.rows == 0 and cache.stats.blocks_free == cache.stats.blocks_total


def test_the_pool_may_grow_while_blocks_land_and_while_a_writer_reads(addressable):
    net = model()
    tokens = prompt(2 * BLOCK)
    blocks = stored(net, tokens)
    cache = new_cache(net, blocks=64, initial=2)
    sequence = cache.open(tokens, None)
    landings = sequence.landing(2)
    fill(landings[0], blocks[0][1], BLOCK)
    first = landings[0].accept(blocks[0][0].tokens, blocks[0][0].chain)
    handle = cache.host_rows(first)
    opened = landings[1].writing()
    windows = opened.__enter__()
    stranger = prompt(5 * BLOCK, seed=3)
    got, other, _ = ask(net, cache, stranger)
    assert same(got, stock_logits(net, stranger))
    assert cache.stats.blocks_total > 2
    at, source = 0, b"".join(blocks[1][1])
    for window in windows:
        window[:] = source[at : at + window.nbytes]
        at += window.nbytes
    opened.__exit__(None, None, None)
    landings[1].accept(blocks[1][0].tokens, blocks[1][0].chain)
    assert b"".join(map(bytes, handle.buffers())) == b"".join(blocks[0][1])
    held = cache.stats.bytes_pool
    handle.release()
    assert cache.stats.bytes_pool < held or addressable == "staged"
    assert cache.stats.bytes_pool == cache.stats.blocks_total * BLOCK * cache.layout.bytes_per_token()
    finish(sequence)
    got, _, computed = ask(net, cache, tokens)
    assert computed == 1
    assert same(got, stock_logits(net, tokens))


def test_a_block_is_neither_evicted_nor_overwritten_while_a_writer_reads_it():
    net = model()
    tokens = prompt(2 * BLOCK)
    cache = new_cache(net, blocks=4)
    _, sequence, _ = ask(net, cache, tokens)
    entry = cache.match(tokens).blocks[1]
    handle = cache.host_rows(type("P", (), {"entry": entry})())
    before = [bytes(buffer) for buffer in handle.buffers()]
    sequence.close()
    for seed in range(3):
        branch = tokens[: BLOCK + 2] + prompt(5, seed=seed)
        got, sequence, _ = ask(net, cache, branch)
        assert near(got, stock_logits(net, branch))
        sequence.close()
    assert [bytes(buffer) for buffer in handle.buffers()] == before
    thread = threading.Thread(target=handle.release)
    thread.start()
    thread.join(30)
    assert cache.clear() > 0 and cache.stats.blocks_free == 4


def test_closing_a_sequence_leaves_its_landings_harmless():
    net = model()
    blocks = stored(net, prompt(2 * BLOCK))
    cache = new_cache(net)
    sequence = cache.open([], None)
    landings = sequence.landing(2)
    sequence.close()
    fill(landings[0], blocks[0][1], BLOCK)
    landings[0].accept(blocks[0][0].tokens, blocks[0][0].chain)
    landings[1].reject()
    assert cache.match(prompt(2 * BLOCK)).rows == BLOCK
    assert cache.stats.blocks_live == 0


def test_what_fills_a_block_that_was_left_spoils_nobody_else(addressable):
    net = model()
    tokens, other = prompt(3 * BLOCK), prompt(4 * BLOCK, seed=5)
    blocks = stored(net, other)
    cache = new_cache(net, blocks=6)
    sequence = cache.open(tokens, None)
    landings = sequence.landing(2)
    opened = landings[0].writing()
    windows = opened.__enter__()
    landings[0].leave()
    assert sequence.rows == 0 and not sequence.block_table
    landings[1].reject()
    sequence.close()
    assert cache.stats.blocks_live == 1
    again = cache.open(other, None)
    landed = again.landing(4)
    for landing, (entry, source) in zip(landed, blocks, strict=True):
        fill(landing, source, len(entry.tokens))
    for window in windows:
        window[:] = b"\xff" * window.nbytes
    opened.__exit__(None, None, None)
    for landing, (entry, _) in zip(landed, blocks, strict=True):
        landing.accept(entry.tokens, entry.chain)
    finish(again)
    landings[0].reject()
    assert cache.stats.blocks_live == 0
    got, _, computed = ask(net, cache, other)
    assert computed == 1
    assert same(got, stock_logits(net, other))


def test_the_pool_is_written_in_place():
    net = model()
    cache = new_cache(net)
    where = [address(array) for array in cache.pool.arrays]
    tokens = prompt(3 * BLOCK + 2)
    _, sequence, _ = ask(net, cache, tokens)
    step(net, cache, sequence, 5)
    finish(sequence)
    ask(net, cache, tokens + [7, 8])
    assert [address(array) for array in cache.pool.arrays] == where


def test_bytes_of_a_failed_restore_do_not_spoil_rows_that_mask_them(addressable):
    """Garbage may read as NaN, and masking a NaN leaves a NaN."""
    net = model()
    cache = new_cache(net, blocks=3)
    cache.paths = Paths(table_from=1)
    sequence = cache.open([], None)
    landings = sequence.landing(3)
    for landing in landings:
        with landing.writing() as windows:
            for window in windows:
                window[:] = b"\xff" * window.nbytes
        landing.reject()
    sequence.close()
    tokens = prompt(BLOCK + 3)
    assert near(ask(net, cache, tokens)[0], stock_logits(net, tokens))


def test_who_shares_a_block_before_the_landings_gets_rows_that_stay(addressable):
    """The front of a prefix is computed while the rest is read, and another prompt ends where it is by now."""
    net, start = model(), BLOCK + BLOCK // 2
    tokens = prompt(3 * BLOCK)
    blocks = stored(net, tokens)
    cache = new_cache(net)
    sequence = cache.open(tokens, None)
    (landing,) = sequence.landing(1, behind=2)
    prefill(net, cache, sequence, tokens[:start], chunk=BLOCK // 2)
    sequence.tail()
    other = cache.open(tokens[:start], cache.match(tokens[:start]))
    assert other.rows == start
    prefill(net, cache, sequence, tokens[: 2 * BLOCK], chunk=BLOCK // 2)
    fill(landing, blocks[2][1], BLOCK)
    landing.accept(blocks[2][0].tokens, blocks[2][0].chain, parent=blocks[2][0].parent)
    assert sequence.rows == 3 * BLOCK
    assert near(step(net, cache, other, 5), stock_logits(net, [*tokens[:start], 5]))
    finish(other)
    assert near(step(net, cache, sequence, 5), stock_logits(net, [*tokens, 5]))
