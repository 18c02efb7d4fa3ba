"""The pool is updated in place: the same buffers, no second copy at any moment."""

from __future__ import annotations

import mlx.core as mx
import pytest

from kvd.cache import pool as pool_module
from kvd.cache.hostmem import address
from kvd.cache.layout import KVLayout, LayerKV, Precision
from kvd.cache.paged import forward
from kvd.cache.placement import Move
from kvd.cache.pool import KVPool
from kvd.cache.results import Consent, PoolFull
from kvd.cache.steps import plan_step
from tests.cache.support import (
    BLOCK,
    ask,
    finish,
    model,
    new_cache,
    prefill,
    prompt,
    same,
    saved,
    step,
    step_batch,
    stock_logits,
)  # fmt: skip


def where(cache):
    return [address(array) for array in cache.pool.arrays]


@pytest.mark.parametrize("kv", ["native", "k8v4"])
def test_prefill_decode_batches_and_moves_keep_every_buffer(kv, monkeypatch):
    net = model()
    cache = new_cache(net, blocks=40, kv=kv)
    moves, execute = [], cache.pool.execute
    monkeypatch.setattr(cache.pool, "execute", lambda found: (moves.extend(found), execute(found)))
    before = where(cache)
    prompts = [prompt(3 * BLOCK + 2), prompt(17, seed=1)]
    sequences = [ask(net, cache, tokens)[1] for tokens in prompts]
    for i in range(BLOCK):
        step_batch(net, cache, sequences, [i, i])
    step(net, cache, sequences[0], 1)
    for sequence in sequences:
        sequence.tail()
        sequence.close()
    _, sequence, _ = ask(net, cache, prompts[0][: BLOCK + 3] + [9] * BLOCK)
    assert any(move.rows == BLOCK for move in moves)
    assert where(cache) == before


@pytest.mark.parametrize("kv", ["native", "k8v4"])
def test_a_chunk_as_large_as_the_pool_is_written_where_the_pool_lies(kv):
    """MLX would put the model's transposed rows in the place of the pool's array, which readers of its bytes know."""
    net, tokens, stored = model(), prompt(4 * BLOCK), []
    for blocks in (4, 8):
        cache = new_cache(net, blocks=blocks, kv=kv)
        before = where(cache)
        sequence = cache.open([], None)
        sequence.reserve(len(tokens))
        forward(net, cache, [(sequence, tokens)], logits=False)
        stored.append([saved(cache, one.entry) for one in sequence.advance(tokens)])
        assert where(cache) == before
    assert stored[0] == stored[1]


@pytest.mark.parametrize("batch", [1, 3])
def test_a_step_takes_no_memory_of_the_pools_size(batch):
    net = model()
    cache = new_cache(net, blocks=4096)
    sequences = [ask(net, cache, prompt(20, seed=i))[1] for i in range(batch)]
    layer = cache.pool.arrays[0].nbytes
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    for i in range(5):
        step_batch(net, cache, sequences, [i] * batch)
    assert mx.get_peak_memory() - held < layer


def test_a_chunk_takes_no_memory_of_the_pools_size():
    net = model()
    cache = new_cache(net, blocks=4096)
    sequence = cache.open([], None)
    sequence.reserve(2 * BLOCK)
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    forward(net, cache, [(sequence, prompt(2 * BLOCK))], logits=False)
    assert mx.get_peak_memory() - held < cache.pool.arrays[0].nbytes


def test_growth_is_asked_for_and_its_transient_is_within_what_was_asked():
    layout = KVLayout((LayerKV(2, 64, 64),) * 8, "float32")
    pool = KVPool(layout, 16, 100)
    asked = pool.growth_bytes(200)
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    pool.grow(200)
    assert mx.get_peak_memory() - held <= asked + (1 << 16)
    assert pool.nbytes == 200 * pool.block_bytes


def test_a_pool_that_may_not_grow_evicts_instead():
    net = model()
    asked = []
    cache = new_cache(net, blocks=64, initial=8, on_bytes=lambda n, needed: asked.append(n) or Consent.NO)
    for seed in range(4):
        _, sequence, _ = ask(net, cache, prompt(4 * BLOCK, seed=seed))
        sequence.close()
    assert asked and cache.stats.blocks_total == 8
    assert cache.stats.evictions["capacity"] > 0


class Budget:
    """`free` bytes beyond the first blocks; `given`: what the pool has of them."""

    def __init__(self, free):
        self.free, self.given, self.needed = free, 0, []

    def __call__(self, nbytes, needed):
        if nbytes > self.free - self.given:
            self.needed.append(needed)
            return Consent.SOON if needed else Consent.NO
        self.given += nbytes
        return Consent.YES


def test_a_pool_grows_by_what_is_left_where_it_cannot_double():
    net = model()
    block = new_cache(net).pool.block_bytes
    budget = Budget(4 * block)
    cache = new_cache(net, blocks=64, initial=8, on_bytes=budget)
    sequence = cache.open([], None, expected_rows=8 * BLOCK)
    sequence.reserve(8 * BLOCK)
    sequence.reserve(9 * BLOCK)
    assert 9 <= cache.stats.blocks_total <= 12
    with pytest.raises(PoolFull) as caught:
        sequence.reserve(13 * BLOCK)
    assert caught.value.soon and budget.needed[-1] and not any(budget.needed[:-1])
    budget.free *= 3
    sequence.reserve(13 * BLOCK)


def test_what_growing_takes_for_a_moment_is_given_back():
    net = model()
    budget = Budget(1 << 30)
    cache = new_cache(net, blocks=64, initial=2, on_bytes=budget)
    first = cache.pool.nbytes
    sequence = cache.open([], None)
    for _ in range(20):
        sequence.reserve(BLOCK)
        prefill(net, cache, sequence, prompt(sequence.rows + BLOCK, seed=3))
    assert cache.stats.blocks_total >= 20
    assert budget.given == cache.pool.nbytes - first


def test_a_device_without_memory_leaves_the_pool_as_it_was(monkeypatch):
    net = model()
    cache = new_cache(net, blocks=64, initial=8)
    tokens = prompt(3 * BLOCK + 2)
    finish(ask(net, cache, tokens)[1])
    known = cache.match(tokens[:BLOCK]).blocks[0]
    before = saved(cache, known)
    original, left = pool_module._zeros, iter(range(2))

    def scarce(part, rows):
        if rows > 8 * BLOCK and next(left, None) is None:
            raise RuntimeError("[malloc] Unable to allocate")
        return original(part, rows)

    monkeypatch.setattr(pool_module, "_zeros", scarce)
    assert not cache.pool.grow(16)
    assert saved(cache, known) == before
    left = iter(range(2))
    long = prompt(6 * BLOCK, seed=1)
    assert same(ask(net, cache, long)[0], stock_logits(net, long))
    assert cache.stats.blocks_total == 8
    assert {array.shape[2] for array in cache.pool.arrays} == {8 * BLOCK}
    assert cache.match(tokens).rows > 0 and same(ask(net, cache, tokens[:BLOCK])[0], stock_logits(net, tokens[:BLOCK]))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("precision", [Precision(), Precision(8, 32)])
def test_host_windows_show_the_rows_head_by_head(dtype, precision):
    layout = KVLayout((LayerKV(3, 32, 64, precision, precision),), dtype)
    pool = KVPool(layout, 4, 6)
    mx.random.seed(1)
    for array in pool.arrays:
        values = mx.random.normal(array.shape) if array.dtype != mx.uint32 else mx.random.randint(0, 99, array.shape)
        array[...] = values.astype(array.dtype)
    generation = pool.acquire()
    with pool.reading(generation, 2, 3) as windows:
        pass
    expected = b""
    for array in pool.arrays:
        rows = mx.contiguous(array[0, :, 8:11, :])
        expected += bytes(memoryview(rows.view(mx.uint16) if rows.dtype == mx.bfloat16 else rows))
    assert b"".join(bytes(window) for window in windows) == expected
    assert len(expected) == layout.bytes_per_token() * 3
    private = pool.copy_rows(2, 3)
    assert b"".join(bytes(window) for window in pool.staged_windows(private, 3)) == expected


@pytest.mark.parametrize(("heads", "blocks"), [(1, 3), (2, 3), (2, 1), (1, 1)])
def test_a_private_copy_does_not_pin_the_pool(heads, blocks):
    pool = KVPool(KVLayout((LayerKV(heads, 4, 4),), "float32"), 4, blocks)
    before = [address(array) for array in pool.arrays]
    private = pool.copy_rows(0, 4)
    for array in pool.arrays:
        array[..., 1:3, :] = mx.ones((1, heads, 2, 4))
    pool.evaluate()
    assert [address(array) for array in pool.arrays] == before
    assert not any(any(bytes(window)) for window in pool.staged_windows(private, 4))


@pytest.mark.parametrize("heads", [1, 2])
def test_moves_copy_the_rows_asked_for_in_order(heads):
    pool = KVPool(KVLayout((LayerKV(heads, 4, 4),), "float32"), 4, 4)
    for block in range(4):
        pool.arrays[0][..., 4 * block : 4 * block + 4, :] = float(block + 1)
    pool.execute([Move(0, 1, 4), Move(1, 2, 2), Move(3, 0, 3)])
    assert pool.arrays[0][0, 0, :, 0].tolist() == [4, 4, 4, 1, 1, 1, 1, 1, 1, 1, 3, 3, 4, 4, 4, 4]


@pytest.mark.parametrize("batch", [1, 3])
def test_steps_in_line_behind_each_other_are_in_place_too(batch):
    """The next step is planned and queued while this one still runs."""
    net = model()
    cache = new_cache(net, blocks=4096)
    sequences = [ask(net, cache, prompt(20, seed=i))[1] for i in range(batch)]
    before, held = where(cache), mx.get_active_memory()
    mx.reset_peak_memory()
    ids = mx.array([5] * batch)
    for _ in range(BLOCK):
        for sequence in sequences:
            sequence.reserve(1)
        out = forward(net, cache, [(sequence, [0]) for sequence in sequences], inputs=ids)
        ids = mx.argmax(out, axis=-1)
        mx.async_eval(ids)
        for sequence in sequences:
            sequence.advance([0])
    mx.eval(ids)
    assert mx.get_peak_memory() - held < cache.pool.arrays[0].nbytes
    assert where(cache) == before


def in_line(array):
    """Something that reads a view of `array` for a while and is being computed now."""
    view = array[..., : array.shape[2] - 4, :]
    out = mx.softmax(mx.ones((1, 1, 1024, array.shape[3])) @ view.swapaxes(-1, -2), axis=-1) @ view
    mx.async_eval(out)
    return out


def test_while_other_threads_hold_addresses_a_pass_waits_for_what_still_reads_the_arrays():
    net = model()
    cache = new_cache(net, blocks=1024)
    _, sequence, _ = ask(net, cache, prompt(20))
    sequence.reserve(1)
    before, generation = where(cache), cache.pool.acquire()
    running = in_line(cache.pool.arrays[0])
    rows = mx.ones((1, 2, 1, 32))
    mx.eval(plan_step(cache, [sequence], 1, False).fetch(0, rows, rows))
    assert where(cache) == before
    generation.drop()
    mx.eval(running)


def test_so_do_moves_and_rows_that_are_brought_in(monkeypatch):
    """Each time: what a copy was made from is let go of a moment after the copy is there."""
    pool = KVPool(KVLayout((LayerKV(2, 4, 4),), "float32"), 4, 4)
    generation, waits = pool.acquire(), []
    monkeypatch.setattr(mx, "synchronize", lambda: waits.append(1))
    pool.execute([Move(0, 1, 4), Move(1, 2, 2)])
    assert len(waits) == 2
    generation.drop()
    pool.zero(3)
    assert len(waits) == 3, "nobody has addresses, but a copy of the array would take longer than to wait"


def test_and_a_chunk_that_others_had_their_turn_within(monkeypatch):
    net = model()
    cache = new_cache(net)
    sequence = cache.open(prompt(9), None)
    sequence.reserve(8)
    generation, said = cache.pool.acquire(), []
    monkeypatch.setattr(mx, "synchronize", lambda: said.append("wait"))
    forward(net, cache, [(sequence, prompt(9)[:8])], logits=False, pause=lambda: said.append("others"))
    generation.drop()
    layers = len(cache.layout.layers)
    assert layers > 1 and said == ["wait", *["others", "wait"] * (layers - 1)]


def test_a_pool_tells_when_an_update_copied_an_array_and_growing_is_none():
    pool = KVPool(KVLayout((LayerKV(2, 64, 64),), "float32"), 4, 8)
    row = mx.ones((1, 2, 1, 64))
    assert not pool.moved()
    pool.write([(pool.arrays[0], 4, row)])
    assert not pool.moved()
    kept = pool.arrays[0][..., :1, :]
    mx.eval(kept)
    pool.write([(pool.arrays[0], 4, row)])
    assert pool.moved() and not pool.moved()
    assert pool.grow(16) and not pool.moved()
    pool.host_addressable = False
    assert not pool.moved()
    assert kept.shape[2] == 1


def test_whoever_asks_for_addresses_after_an_update_that_copied_gets_those_of_the_copy():
    pool = KVPool(KVLayout((LayerKV(2, 64, 64),), "float32"), 4, 8)
    pool.acquire().drop()
    kept = pool.arrays[0][..., :1, :]
    mx.eval(kept)
    pool.write([(pool.arrays[0], 4, mx.ones((1, 2, 4, 64)))])
    generation = pool.acquire()
    with pool.reading(generation, 1, 4) as windows:
        assert bytes(windows[0]) == bytes(memoryview(mx.ones((4, 64))))
    generation.drop()
    assert kept.shape[2] == 1
