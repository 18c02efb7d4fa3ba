"""How a decode batch is taken apart: each row exactly once, and reading what saves most."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.cache import plan
from kvd.cache.paths import Paths
from kvd.cache.plan import Piece, View, bundles, pieces

SIZE = 4


@pytest.fixture(autouse=True)
def fold_early(monkeypatch):
    monkeypatch.setattr(plan, "SAVED_ROWS", SIZE)


def view(table, rows=None):
    return View(tuple(table), rows or len(table) * SIZE)


@given(st.lists(st.integers(0, 5), max_size=6, unique=True), st.integers(0, 24), st.integers(0, 24))
def test_pieces_list_exactly_the_rows_asked_for_in_order(table, first, stop):
    stop = min(stop, len(table) * SIZE)
    rows = [row for piece in pieces(table, SIZE, first, stop) for row in range(piece.start, piece.stop)]
    assert rows == [table[i // SIZE] * SIZE + i % SIZE for i in range(first, stop)]
    found = pieces(table, SIZE, first, stop)
    assert all(a.stop != b.start for a, b in zip(found, found[1:], strict=False))


@st.composite
def trees(draw):
    """Views that share blocks as prefix trees do: a block has one past."""
    views, fresh = [], iter(range(1000))
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.sampled_from(views)).table if views and draw(st.booleans()) else ()
        start = start[: draw(st.integers(0, len(start)))]
        table = start + tuple(next(fresh) for _ in range(draw(st.integers(1, 3))))
        views.append(View(table, (len(table) - 1) * SIZE + draw(st.integers(1, SIZE))))
    return views


@given(trees(), st.booleans(), st.booleans(), st.sampled_from([None, 1, 9]))
def test_every_row_reads_its_own_blocks_once(views, fold, table, table_from):
    found = bundles(views, SIZE, Paths(fold=fold, table=table, table_from=table_from))
    assert sorted(row for bundle in found for row in bundle.rows) == list(range(len(views)))
    for bundle in found:
        assert bundle.shared or bundle.tails
        for at, row in enumerate(bundle.rows):
            read = [r for piece in bundle.shared for r in range(piece.start, piece.stop)]
            if bundle.tails:
                tail = [block * SIZE + r for block in bundle.tails[at] for r in range(SIZE)]
                read += tail[: bundle.lengths[at]]
                assert 0 < bundle.lengths[at] <= len(tail)
            assert read == [views[row].table[i // SIZE] * SIZE + i % SIZE for i in range(views[row].rows)]


def test_rows_fold_over_what_they_share():
    found = bundles([view([0, 1, 2]), view([9, 8]), view([0, 1, 5])], SIZE, Paths())
    assert [bundle.rows for bundle in found] == [(0, 2), (1,)]
    assert found[0].shared == (Piece(0, 8),) and found[0].tails == ((2,), (5,))


def test_a_short_common_head_does_not_keep_long_documents_apart():
    """Two pairs of documents behind one system prompt: folding each pair saves more than folding all at the head."""
    one, two = [0, *range(10, 20)], [0, *range(30, 40)]
    found = bundles([view([*one, 50]), view([*one, 51]), view([*two, 52]), view([*two, 53])], SIZE, Paths())
    assert [bundle.rows for bundle in found] == [(0, 1), (2, 3)]


def test_the_last_row_stays_out_of_what_is_shared():
    """A row that ends at the border of a shared block still has a tail of its own to write into."""
    found = bundles([view([0, 1]), view([0, 1, 2])], SIZE, Paths())
    assert found[0].shared == (Piece(0, 4),) and found[0].lengths == (4, 8)


def test_long_rows_do_not_make_short_ones_read_padding():
    views = [view(range(20)), view(range(30, 49)), view([60, 61]), view([70])]
    found = bundles(views, SIZE, Paths(table_from=1))
    assert [bundle.rows for bundle in found] == [(0, 1), (2,), (3,)]
