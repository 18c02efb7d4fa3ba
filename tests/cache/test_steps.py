"""Decode batches: every row's logits are those of the sequence alone, whatever shares the batch."""

from __future__ import annotations

import mlx.core as mx
import pytest

from kvd.cache import plan, steps
from kvd.cache.attention import PagedTails, attend_bundle
from kvd.cache.kernel import Span, Tables
from kvd.cache.paged import forward
from kvd.cache.paths import Paths
from kvd.cache.plan import Bundle, View
from tests.cache.support import BLOCK, ask, model, near, new_cache, prompt, same, step, step_batch, stock_logits


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("lengths", [(5, 9), (3, 40, 17), (8, 16, 24, 7, 1, 33, 2, 50)])
@pytest.mark.parametrize("paths", [Paths(), Paths(table_batch=1, grain=BLOCK // 4)], ids=["view", "table"])
def test_strangers_of_unequal_length_decode_together(family, lengths, paths):
    net = model(family)
    cache = new_cache(net, blocks=128)
    cache.paths = paths
    prompts = [prompt(length, seed=i) for i, length in enumerate(lengths)]
    sequences = [ask(net, cache, tokens)[1] for tokens in prompts]
    answers = [prompt(12, seed=100 + i) for i in range(len(lengths))]
    for i in range(12):
        out = step_batch(net, cache, sequences, [answer[i] for answer in answers])
    for i, (tokens, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert near(out[i : i + 1], stock_logits(net, tokens + answer)), i


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("rows", [2, 5])
def test_rows_that_share_a_prefix_decode_together(monkeypatch, fold, rows):
    monkeypatch.setattr(plan, "SAVED_ROWS", BLOCK if fold else 10**6)
    net = model()
    cache = new_cache(net, blocks=128)
    prefix = prompt(4 * BLOCK)
    sequences, histories = [], []
    for i in range(rows):
        tokens = prefix + prompt(3 + 5 * i, seed=i)
        _, sequence, computed = ask(net, cache, tokens)
        assert computed == len(tokens) - (4 * BLOCK if i else 0)
        sequences.append(sequence)
        histories.append(tokens)
    for i in range(10):
        out = step_batch(net, cache, sequences, [(7 * i + row) % 500 for row in range(rows)])
        for row in range(rows):
            histories[row] = [*histories[row], (7 * i + row) % 500]
    for row in range(rows):
        assert near(out[row : row + 1], stock_logits(net, histories[row])), row
    shared = {block for sequence in sequences for block in sequence.block_table[:4]}
    assert len(shared) == 4


def test_forks_share_their_prompt_and_part_at_the_first_token():
    net = model()
    cache = new_cache(net)
    tokens = prompt(2 * BLOCK + 3)
    _, first, _ = ask(net, cache, tokens)
    twins = [first, first.fork(), first.fork()]
    live = cache.stats.blocks_live
    assert live == 3
    for i in range(6):
        out = step_batch(net, cache, twins, [i, i + 50, i + 100])
    for row, start in enumerate((0, 50, 100)):
        assert near(out[row : row + 1], stock_logits(net, tokens + [start + i for i in range(6)]))


@pytest.mark.parametrize("paths", [Paths(), Paths(table=False)])
def test_a_sequence_in_many_runs_decodes_like_one_in_a_single_run(monkeypatch, paths):
    monkeypatch.setattr("kvd.cache.sequence.STRAIGHTENED", 0)
    net = model()
    cache = new_cache(net, blocks=64)
    cache.paths = paths
    tokens = prompt(12 * BLOCK + 1)
    a, b = cache.open([], None), cache.open([], None)
    history = []
    while a.rows < len(tokens) - 1:
        part = tokens[a.rows : a.rows + BLOCK]
        for sequence in (a, b):
            sequence.expected_rows = 0
            cache.manager.claims.drop(sequence)
            sequence.reserve(len(part))
            forward(net, cache, [(sequence, part)], logits=False)
            sequence.advance(part)
        history += part
    assert max(len(a.runs()), len(b.runs())) > 5
    for sequence in (a, b):
        assert near(step(net, cache, sequence, 3), stock_logits(net, history + [3]))


def test_a_row_gives_the_same_bits_alone_and_in_company():
    net = model()
    prompts = [prompt(length, seed=i) for i, length in enumerate((30, 55, 9))]
    for paths in (Paths(), Paths(table_from=1), Paths(table_from=1, grain=BLOCK // 2)):
        rows = []
        for members in ([0], [1], [2], [0, 1, 2]):
            cache = new_cache(net)
            cache.paths = paths
            rows.append(step_batch(net, cache, [ask(net, cache, prompts[i])[1] for i in members], [7] * len(members)))
        assert same(mx.concatenate(rows[:3]), rows[3])


def test_a_scattered_sequence_gives_the_same_bits_through_the_block_table():
    net = model()
    tokens = prompt(4 * BLOCK + 3)
    outs = []
    for scatter in (False, True):
        cache = new_cache(net)
        cache.paths = Paths(table_from=1)
        _, first, _ = ask(net, cache, tokens)
        if scatter:
            first.tail()
            _, sequence, _ = ask(net, cache, tokens)
        else:
            sequence = first
        outs += [step(net, cache, sequence, 9), step(net, cache, sequence, 10)]
        assert (len(sequence.runs()) > 1) == scatter
    assert same(outs[0], outs[2]) and same(outs[1], outs[3])


def test_half_precision_batches_stay_in_half_precision():
    net = model("llama", dtype="float16")
    cache = new_cache(net)
    assert cache.layout.dtype == "float16"
    prompts = [prompt(20, seed=1), prompt(31, seed=2)]
    sequences = [ask(net, cache, tokens)[1] for tokens in prompts]
    out = step_batch(net, cache, sequences, [4, 5])
    assert out.dtype == mx.float16
    for i, tokens in enumerate(prompts):
        assert near(out[i : i + 1], stock_logits(net, tokens + [4 + i]), 0.05)


@pytest.mark.parametrize("kv", ["native", "k8v4"])
@pytest.mark.parametrize("lengths", [(50,), (50, 7, 31), (50, 7, 31, 12, 3)], ids=["one", "three", "five"])
def test_with_a_kernel_a_step_is_one_launch_a_layer(monkeypatch, lengths, kv):
    """The kernel itself is in test_kernel.py; here what it is given, computed the portable way."""
    given = []

    def attend(queries, new, k, v, where, scale, block_size, told):
        if isinstance(where, Span):
            first, rows = where.first, where.longest
            tails, counts = (tuple(range(first // block_size, -(-(first + rows) // block_size))),), (rows,)
        else:
            counts = tuple(where.lengths.tolist())
            blocks = zip(where.blocks.tolist(), counts, strict=True)
            tails = tuple(tuple(row[: -(-n // block_size)]) for row, n in blocks)
        given.append((type(where), counts))
        assert len(counts) == len(queries)
        counts = tuple(n for n in counts if n)
        idle = mx.zeros((len(queries) - len(counts), *queries.shape[1:]))
        tails, queries = tails[: len(counts)], queries[: len(counts)]
        lasts = zip(tails, (n - 1 for n in counts), strict=True)
        ends = [tail[last // block_size] * block_size + last % block_size for tail, last in lasts]
        assert told is None if kv == "native" else told.tolist() == ends + [-1] * len(idle)
        for i, at in enumerate(ends):
            for side, rows in zip((k, v), new, strict=True):
                for part, row in zip(side.parts, side.quantize(rows[i : i + 1]), strict=True):
                    part[..., at : at + 1, :] = row
        bundle = Bundle(tuple(range(len(counts))), (), tails, counts)
        out = attend_bundle(queries, k, v, (), PagedTails.of(bundle, block_size), scale)
        return mx.concatenate([out, idle])

    monkeypatch.setattr(steps, "attend_paged", attend)
    net = model()
    cache, portable = new_cache(net, blocks=128, kv=kv), new_cache(net, blocks=128, kv=kv)
    cache.paths = Paths(kernel=True)
    histories = [prompt(length, seed=length) for length in lengths]
    sequences, others = ([ask(net, one, tokens)[1] for tokens in histories] for one in (cache, portable))
    for i in range(BLOCK + 3):
        given.clear()
        out = step_batch(net, cache, sequences, [9 + i] * len(lengths))
        expected_out = step_batch(net, portable, others, [9 + i] * len(lengths))
        histories = [[*tokens, 9 + i] for tokens in histories]
        counts = tuple(map(len, histories))
        expected = (Span, counts) if len(lengths) == 1 else (Tables, (*counts, *[0] * (3 if len(lengths) == 5 else 0)))
        assert given == [expected] * len(net.layers)
        assert out.shape[0] == len(lengths)
    assert near(out, expected_out)
    for i, tokens in enumerate(histories):
        assert kv != "native" or near(out[i : i + 1], stock_logits(net, tokens)), i


def test_block_tables_stay_on_the_device_while_they_are_right():
    first = [View((1, 2), 20), View((5,), 9)]
    tables = Tables.of(first)
    longer = Tables.of([View((1, 2), 21), View((5,), 10)], tables)
    assert longer.blocks is tables.blocks and longer.lengths.tolist() == [21, 10]
    assert Tables.of(first, tables) is tables
    others = ([View((1, 2), 21), View((6,), 10)], [View((1, 2), 21), View((5,), 9)], [View((1, 2), 21)])
    for views in others:
        fresh = Tables.of(views, tables)
        assert fresh.blocks is not tables.blocks and fresh.lengths.tolist() == [view.rows for view in views]


def test_rows_of_no_sequence_stay_without_rows():
    tables = Tables.of([View((1, 2), 20), View((5,), 9)], batch=4)
    assert tables.blocks.tolist() == [[1, 2], [5, 0], [0, 0], [0, 0]] and tables.lengths.tolist() == [20, 9, 0, 0]
    longer = Tables.of([View((1, 2), 21), View((5,), 10)], tables, 4)
    assert longer.blocks is tables.blocks and longer.lengths.tolist() == [21, 10, 0, 0]
