"""The index finds the best child exactly, whatever the number of siblings."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from kvd.cache.chain import common_prefix, namespace
from kvd.cache.prefix import PrefixIndex, make_entry

SIZE = 8
ROOT = namespace({"r": 0})
TOKENS = st.lists(st.sampled_from([0, 1, 255, 256, 65535, 65536]), min_size=1, max_size=SIZE)


def filled(children):
    index = PrefixIndex(SIZE)
    for i, tokens in enumerate(children):
        index.add(make_entry(i, ROOT, ROOT, tokens, 0, SIZE))
    return index


@given(st.lists(TOKENS, max_size=30), TOKENS)
def test_the_best_child_is_the_one_a_full_scan_finds(children, asked):
    child, common = filled(children).best_child(ROOT, asked)
    assert common == max((common_prefix(tokens, asked) for tokens in children), default=0)
    if child is not None:
        assert common_prefix(child.tokens, asked) == common


@given(st.lists(TOKENS, max_size=30))
def test_no_partial_child_is_contained_in_a_sibling(children):
    index = filled(children)
    known = [entry.tokens for entry in index._children.get(ROOT, [])]
    for a in known:
        assert not any(a != b and b[: len(a)] == a for b in known)
    for tokens in children:
        child, common = index.best_child(ROOT, tokens)
        assert common == len(tokens)


def test_the_best_of_ten_thousand_siblings():
    source = random.Random(1)
    children = [[source.randrange(50) for _ in range(SIZE)] for _ in range(10_000)]
    index = filled(children)
    asked = [*children[77][:6], 99, 99]
    assert index.best_child(ROOT, asked)[1] == max(common_prefix(tokens, asked) for tokens in children)


def test_a_match_reports_the_stored_token_where_the_prompt_diverges():
    index = filled([[1, 2, 3, 4, 5, 6, 7, 8]])
    match = index.match(ROOT, [1, 2, 3, 9, 9])
    assert (match.rows, match.child_rows, match.stored_token) == (3, 3, 4)
    assert index.match(ROOT, [7]).stored_token == 1
    assert index.match(ROOT, [1, 2]).stored_token is None
    full = index.match(ROOT, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert (full.rows, len(full.blocks), full.child, full.stored_token) == (8, 1, None, None)
    assert index.match(ROOT, [1, 2, 3]).full_blocks().rows == 0


def test_namespaces_share_nothing():
    index = filled([[1, 2, 3]])
    assert index.match(namespace({"r": 1}), [1, 2, 3]).rows == 0
