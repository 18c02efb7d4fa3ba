"""The allocator against a plain memory of tokens: what the index says is in a block is really there."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvd.cache import sequence as sequences
from kvd.cache.blocks import BlockManager
from kvd.cache.chain import Chain, chains, namespace, next_chain
from kvd.cache.prefix import PrefixIndex
from kvd.cache.results import PoolFull
from kvd.cache.sequence import CachedSequence

SIZE = 4
SPACES = [namespace({"n": 0}), namespace({"n": 1})]


class FakePool:
    """Rows hold (namespace, full token history): causality means a row is right only with its whole past."""

    def __init__(self, blocks: int) -> None:
        self.rows = [[None] * SIZE for _ in range(blocks)]

    host_addressable = True

    def acquire(self):
        return SimpleNamespace(drop=lambda: None)

    def carry_over(self, generation, block, rows):
        pass

    def zero(self, block):
        self.rows[block] = [None] * SIZE

    def execute(self, moves):
        for move in moves:
            self.rows[move.dst][: move.rows] = self.rows[move.src][: move.rows]


class FakeCache:
    """The part of PagedCache that sequences use, without mlx."""

    def __init__(self, blocks: int, limit: int | None = None) -> None:
        self.block_size = SIZE
        self.index = PrefixIndex(SIZE)
        self.manager = BlockManager(self.index, blocks)
        self.pool = FakePool(blocks)
        self.limit = limit or blocks
        self.sequences = set()

    def assert_owner(self):
        pass

    def make_room(self, needed, run=0):
        total = self.manager.total
        if self.manager.free < needed and total < self.limit:
            self.manager.grow(min(self.limit, total * 2))
            self.pool.rows += [[None] * SIZE for _ in range(self.manager.total - total)]
        if self.manager.available < needed:
            raise PoolFull(needed, self.manager.available)

    def run_moves(self):
        self.pool.execute(self.manager.take_moves())

    def open(self, space, tokens, expected):
        sequence = CachedSequence(self, space, expected)
        self.sequences.add(sequence)
        sequence.adopt(self.index.match(space, tokens))
        return sequence

    def land(self, sequence, tokens, part):
        """Restore what follows from the store; blocks arrive in any order, some fail, some after the sequence."""
        sequence.truncate(sequence.rows // SIZE * SIZE)
        following = [*sequence.tokens, *tokens]
        first = sequence.rows // SIZE
        count = -(-len(tokens) // SIZE)
        landings = sequence.landing(count)
        steps = [sequence.namespace, *chains(sequence.namespace, following, SIZE)]
        source = random.Random(part)
        order = list(range(count))
        source.shuffle(order)
        for at in order:
            block = following[(first + at) * SIZE : (first + at + 1) * SIZE]
            fate = source.random()
            if fate < 0.1:
                sequence.close()
            if fate > 0.8:
                landings[at].reject()
                continue
            for row, _ in enumerate(block):
                past = tuple(following[: (first + at) * SIZE + row + 1])
                self.pool.rows[landings[at].block][row] = (sequence.namespace, past)
            parent = steps[first + at]
            used = source.randrange(len(block) + 1) if fate > 0.6 else None
            landings[at].accept(block, next_chain(parent, block), parent=parent, used=used)

    def write(self, sequence, tokens):
        """A forward pass."""
        sequence.reserve(len(tokens))
        history = [*sequence.tokens]
        for token in tokens:
            block, row = sequence.block_table[len(history) // SIZE], len(history) % SIZE
            assert self.manager.refs[block] == 1, "a shared block was written"
            assert row >= self.manager.sealed[block], "a known row was written"
            history.append(token)
            self.pool.rows[block][row] = (sequence.namespace, tuple(history))
        sequence.advance(tokens)


def check(cache: FakeCache) -> None:
    manager = cache.manager
    held = [0] * manager.total
    for sequence in cache.sequences:
        for at in range(sequence.rows):
            row = cache.pool.rows[sequence.block_table[at // SIZE]][at % SIZE]
            assert row == (sequence.namespace, tuple(sequence.tokens[: at + 1])), "a live row is wrong"
        for block in sequence.block_table:
            held[block] += 1
    assert held == manager.refs
    known = 0
    for block, entry in enumerate(manager.entries):
        if entry is None:
            continue
        known += 1
        assert entry.block == block and cache.index.get(entry.chain) is entry
        past = cache.pool.rows[block][len(entry.tokens) - 1]
        assert past[0] == entry.namespace and past[1][entry.start :] == entry.tokens
        steps = chains(entry.namespace, past[1], SIZE)
        parent = steps[entry.start // SIZE - 1] if entry.start else Chain(entry.namespace)
        assert parent == entry.parent, "the block belongs to another past"
    assert known == len(cache.index)
    unused = {b for b in range(manager.total) if not manager.refs[b] and not manager.pins[b]}
    assert {b for b in unused if manager.entries[b] is None} == manager._free
    assert 0 <= manager.cached <= manager.total




def nearly_zeros(length: int, at: int) -> list[int]:
    """Collisions are what this is about: nearly all prompts are prefixes of each other."""
    return [int(i == at) for i in range(length)]


KINDS = ["open"] * 5 + ["write"] * 8 + ["close"] * 4 + ["land"] * 2 + ["pin"] * 2
KINDS += ["tail", "reserve", "fork", "truncate", "unpin"]


def action(source: random.Random) -> tuple[str, ...]:
    """One step of a campaign. Long campaigns from a seed reach states that short shrinkable ones rarely do."""
    tokens = nearly_zeros(source.randrange(1, 14), source.choice([1, 3, 4, 6, 9, 99, 99, 99]))
    kind = source.choice(KINDS) if source.random() > 0.02 else "clear"
    if kind == "open":
        return kind, source.choice([0, 0, 0, 1]), tokens, source.randrange(30)
    return kind, source.randrange(30), tokens, source.random()


@settings(max_examples=250, deadline=None)
@given(st.integers(3, 12), st.integers(0, 1), st.integers(1, 100), st.integers(0, 2**32))
def test_blocks_always_hold_the_chain_they_are_known_by(blocks, grows, count, seed):
    source = random.Random(seed)
    cache = FakeCache(blocks, blocks * 3 if grows else None)
    live, pinned = [], []
    for name, *args in (action(source) for _ in range(count)):
        sequence = live[args[0] % len(live)] if live and name in SEQUENCE_ACTIONS else None
        if name == "open":
            space, tokens, expected = args
            if len(live) > 4:
                continue
            live.append(cache.open(SPACES[space], tokens, expected))
        elif name == "pin":
            known = [b for b, e in enumerate(cache.manager.entries) if e is not None]
            if known:
                block = known[args[0] % len(known)]
                cache.manager.pin(block)
                rows = len(cache.manager.entries[block].tokens)
                pinned.append((block, cache.pool.rows[block][:rows]))
        elif name == "unpin" and pinned:
            block, _ = pinned.pop(args[0] % len(pinned))
            cache.manager.unpin(block)
        elif name == "clear":
            cache.manager.clear(SPACES[args[0] % 2])
        elif sequence is not None:
            act(cache, live, sequence, name, *args[1:])
        check(cache)
        for block, rows in pinned:
            assert cache.pool.rows[block][: len(rows)] == rows, "rows changed under a reader"
    for sequence in live:
        sequence.close()
    for block, _ in pinned:
        cache.manager.unpin(block)
    check(cache)
    cache.manager.clear()
    assert len(cache.index) == 0 and cache.manager.free == cache.manager.total
    assert set(cache.manager.refs) == {0} and cache.manager.available == cache.manager.total


SEQUENCE_ACTIONS = {"write", "land", "reserve", "tail", "close", "fork", "truncate"}


def act(cache, live, sequence, name, tokens, part):
    if name == "write":
        before = (sequence.block_table, list(cache.manager.refs))
        try:
            cache.write(sequence, tokens)
        except PoolFull as full:
            assert full.needed > full.free
            assert (sequence.block_table, cache.manager.refs[: len(before[1])]) == before
    elif name == "tail":
        sequence.tail()
    elif name == "reserve":
        if cache.manager.available > 2:
            sequence.reserve(min(len(tokens), SIZE))
    elif name == "land":
        try:
            cache.land(sequence, tokens, part)
        except PoolFull as full:
            assert full.needed > full.free
        if sequence.closed:
            live.remove(sequence)
    elif name == "fork":
        live.append(sequence.fork())
    elif name == "truncate":
        sequence.truncate(int(sequence.rows * part))
    else:
        sequence.close()
        live.remove(sequence)


def test_the_next_turn_goes_on_in_place_while_the_old_tail_moves_away():
    cache = FakeCache(12)
    first = cache.open(SPACES[0], [], 16)
    cache.write(first, list(range(14)))
    first.tail()
    start = first.block_table
    first.close()
    again = cache.open(SPACES[0], [0, 1, 2, 3, 4, 5], 14)
    assert again.rows == 6
    cache.write(again, [7] * 8)
    assert again.block_table == start
    check(cache)
    assert cache.index.match(SPACES[0], list(range(14))).rows == 14


def test_sequences_that_start_together_leave_each_other_room():
    cache = FakeCache(16)
    a, b = cache.open(SPACES[0], [], 24), cache.open(SPACES[1], [], 24)
    for i in range(24):
        cache.write(a, [i])
        cache.write(b, [i])
    assert a.block_table == tuple(range(a.block_table[0], a.block_table[0] + 6))
    assert b.block_table == tuple(range(b.block_table[0], b.block_table[0] + 6))


def test_tails_are_evicted_before_the_heads_they_need():
    cache = FakeCache(4)
    first = cache.open(SPACES[0], [], 0)
    cache.write(first, list(range(16)))
    first.close()
    other = cache.open(SPACES[1], [], 0)
    cache.write(other, [1] * 8)
    assert cache.index.match(SPACES[0], list(range(16))).rows == 8
    assert cache.manager.evictions["capacity"] == 2


def test_a_full_pool_is_an_error_with_both_numbers_and_changes_nothing():
    cache = FakeCache(3)
    first = cache.open(SPACES[0], [], 0)
    cache.write(first, list(range(8)))
    second = cache.open(SPACES[1], [], 0)
    with pytest.raises(PoolFull) as caught:
        second.reserve(9)
    assert (caught.value.needed, caught.value.free) == (3, 1)
    assert second.block_table == ()


def test_a_longer_tail_supersedes_the_shorter_one():
    cache = FakeCache(8)
    first = cache.open(SPACES[0], [], 0)
    cache.write(first, [1, 2])
    assert first.tail() is not None and first.tail() is None
    cache.write(first, [3])
    assert first.tail().tokens == (1, 2, 3)
    assert len(cache.index) == 1
    first.close()
    assert cache.manager.free == 7


def test_rows_that_a_reader_uses_stay_when_a_longer_tail_supersedes_them():
    cache = FakeCache(8)
    first = cache.open(SPACES[0], [], 0)
    cache.write(first, [1, 2])
    known = first.tail()
    cache.manager.pin(known.block)
    second = cache.open(SPACES[0], [1], 0)
    cache.write(second, [2, 3])
    second.tail()
    assert known.entry.block is None
    first.truncate(1)
    cache.write(first, [9])
    assert cache.pool.rows[known.block][1] == (SPACES[0], (1, 2))
    assert first.block_table[0] != known.block
    check(cache)


def test_a_hit_in_a_full_pool_evicts_one_block_at_most_to_become_one_run(monkeypatch):
    cache = FakeCache(4)
    monkeypatch.setattr(sequences, "STRAIGHTENED", 0)
    a = cache.open(SPACES[0], [], 0)
    cache.write(a, [1] * 4)
    b = cache.open(SPACES[1], [], 0)
    cache.write(b, [2] * 4)
    cache.write(a, [1] * 4)
    cache.write(b, [2] * 4)
    for sequence in (a, b):
        sequence.close()
    monkeypatch.setattr(sequences, "STRAIGHTENED", 16)
    again = cache.open(SPACES[0], [1] * 8, 0)
    assert again.rows == 8 and len(again.runs()) == 1
    assert cache.manager.evictions == {"capacity": 1}
    check(cache)


@example(113508, 40)
@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([48, 80, 200]))
def test_a_sequence_alone_is_always_one_run(seed, blocks):
    """Turns, edits, branches and returns, one after the other: only live sharing makes two runs."""
    source = random.Random(seed)
    cache = FakeCache(blocks)
    prompts = [[source.randrange(3) for _ in range(source.randrange(1, 30))] for _ in range(3)]
    for _ in range(40):
        base = source.choice(prompts)
        tokens = base[: source.randrange(1, len(base) + 1)] + [source.randrange(3) for _ in range(source.randrange(9))]
        sequence = cache.open(SPACES[0], tokens, source.choice([0, len(tokens) + 9]))
        rest = tokens[sequence.rows :]
        if rest:
            cache.write(sequence, rest)
        for _ in range(source.randrange(12)):
            cache.write(sequence, [source.randrange(3)])
        assert len(sequence.runs()) <= 1, cache.manager.evictions
        prompts = [*prompts[-5:], list(sequence.tokens)] if len(sequence.tokens) < 60 else prompts
        if source.random() < 0.8:
            sequence.tail()
        sequence.close()
    check(cache)
