"""The order among siblings finds the best child exactly; rows come back or the damage is said."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.cache.chain import common_prefix, next_chain
from kvd.store.index import Batch, Index
from kvd.store.kv import IndexFailed, KeyValueTable, LmdbKeyValue
from kvd.store.table import Slot

PARENT = b"p" * 16


def slot(tokens: tuple[int, ...], parent: bytes = PARENT) -> Slot:
    chain = bytes(next_chain(parent, tokens))
    return Slot(PARENT, chain, parent, b"c" * 16, len(tokens), 0, 5000, 8192, 3, 12.3, 0.0, "wörds")


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    made = Index(lambda: LmdbKeyValue(str(tmp_path), sync=False))
    made.reopen()
    yield made
    made.close()


def test_a_row_comes_back_as_it_was_put(index: Index) -> None:
    put = slot((1, 2, 3))
    index.apply(Batch(add=[(put, (1, 2, 3))]))
    index.reopen()
    assert list(index.load()) == [put] and index.tokens(put.chain) == (1, 2, 3)
    index.apply(Batch(remove=[put]))
    assert list(index.load()) == [] and index.best_child(PARENT, [1, 2, 3]) is None


def best(children: list[tuple[int, ...]], asked: list[int]) -> int:
    return max((common_prefix(child, asked) for child in children), default=0)


ids = st.sampled_from([0, 1, 2, 4_000_000_000])
stems = st.sampled_from([(), (1,) * 63, (1,) * 64, (0,) * 130])
blocks = st.builds(lambda stem, rest: (*stem, *rest), stems, st.lists(ids, min_size=1, max_size=70)).map(tuple)


@settings(max_examples=150, deadline=None)
@given(st.lists(blocks, min_size=1, max_size=12, unique=True), blocks)
def test_the_best_child_is_the_one_with_the_longest_common_prefix(
    tmp_path_factory: pytest.TempPathFactory, children: list[tuple[int, ...]], asked: tuple[int, ...]
) -> None:
    index = Index(lambda: LmdbKeyValue(str(folder), sync=False))
    folder = tmp_path_factory.mktemp("index")
    index.reopen()
    index.apply(Batch(add=[(slot(c), c) for c in children]))
    index.apply(Batch(add=[(slot((9,), b"q" * 16), (9,))]))
    found = index.best_child(PARENT, asked)
    assert (found[1] if found else 0) == best(children, list(asked))
    if found:
        tokens = index.tokens(found[0])
        assert common_prefix(tokens, asked) == found[1]
    index.close()


def test_the_best_of_ten_thousand_siblings_is_found_in_no_time(index: Index) -> None:
    children = [(n // 100, n % 100, *range(62), n, 7) for n in range(10_000)]
    index.apply(Batch(add=[(slot(c), c) for c in children]))
    began = time.perf_counter()
    for n in range(0, 10_000, 100):
        assert index.best_child(PARENT, [n // 100, n % 100, *range(62), n, 8]) == (slot(children[n]).chain, 65)
    assert time.perf_counter() - began < 100 * 0.01


def test_a_row_that_was_altered_is_damage_not_data(index: Index, tmp_path: Path) -> None:
    put = slot((1, 2))
    index.apply(Batch(add=[(put, (1, 2))]))
    index.close()
    env = LmdbKeyValue(str(tmp_path))
    with env.write() as writer:
        value = writer.get(KeyValueTable.SHARDS, put.chain)
        assert value
        writer.put(KeyValueTable.SHARDS, put.chain, bytes([value[0] ^ 1]) + value[1:])
    env.close()
    index.reopen()
    with pytest.raises(IndexFailed, match="damaged"):
        list(index.load())


def test_an_index_of_another_schema_is_refused(index: Index, tmp_path: Path) -> None:
    index.close()
    env = LmdbKeyValue(str(tmp_path))
    with env.write() as writer:
        writer.put(KeyValueTable.META, b"schema", b"0")
    env.close()
    with pytest.raises(IndexFailed, match="schema"):
        index.reopen()


def test_a_failed_transaction_changes_nothing(index: Index) -> None:
    put = slot((1, 2))
    with pytest.raises(IndexFailed):
        index.apply(Batch(add=[(put, (1, 2))], meta={"x" * 600: b"a key LMDB refuses"}))
    assert list(index.load()) == []
    index.apply(Batch(add=[(put, (1, 2))]))
    assert list(index.load()) == [put]
