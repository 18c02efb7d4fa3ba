"""Identity: what differs anywhere misses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.cache.chain import STEP, chains, child_keys, common_prefix, namespace, next_chain, ordered_bytes, salted

IDS = st.lists(st.integers(0, 2**32 - 2), max_size=70)


@given(st.dictionaries(st.text(max_size=3), st.text(max_size=3), min_size=1, max_size=4))
def test_a_namespace_depends_on_every_name_and_value(fields):
    base = namespace(fields)
    assert base == namespace(dict(reversed(list(fields.items()))))
    for name in fields:
        assert namespace({**fields, name: fields[name] + "x"}) != base
        assert namespace({k: v for k, v in fields.items() if k != name}) != base
    assert namespace({**fields, "extra": ""}) != base


def test_fields_cannot_run_into_each_other():
    assert namespace({"a": "bc"}) != namespace({"ab": "c"})
    assert namespace({"a": 1}) != namespace({"a": "1"})
    assert namespace({"a": b"1"}) != namespace({"a": "1"})


def test_salts_share_nothing_and_no_salt_is_the_base():
    base = namespace({"a": 1})
    assert salted(base, "") == base
    assert len({base, salted(base, "x"), salted(base, "y")}) == 3


def test_chains_depend_on_all_that_came_before():
    root = namespace({"a": 1})
    one, two = chains(root, [1, 2, 3, 4, 5], 2), chains(root, [9, 2, 3, 4, 5], 2)
    assert len(one) == 2 and one[0] != two[0] and one[1] != two[1]
    assert one[0] == next_chain(root, [1, 2]) and one[1] == next_chain(one[0], [3, 4])
    assert chains(namespace({"a": 2}), [1, 2], 2) != one[:1]


def test_the_format_on_disk_is_fixed():
    root = namespace({"weights": "abc", "block_size": 256, "layout": b"kv1"})
    assert root.hex() == "06272b23e3e019ffaa4a6dde7ce9ad54"
    assert next_chain(root, [1, 2, 70000]).hex() == "5f1a057f49637eb66299f47db9a5146f"


@given(IDS, IDS)
def test_ordered_bytes_compare_as_the_ids_do(left, right):
    assert (ordered_bytes(left) < ordered_bytes(right)) == (left < right)


@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), max_size=30))
def test_the_common_prefix_is_the_longest_also_of_a_list_and_a_tuple(left, right):
    n = common_prefix(left, right)
    assert left[:n] == right[:n]
    assert n == min(len(left), len(right)) or left[n] != right[n]
    assert common_prefix(left, tuple(right)) == n


@given(st.lists(st.integers(0, 9), min_size=1, max_size=256))
def test_child_keys_fit_lmdb_and_descend_by_steps(tokens):
    root = namespace({"a": 1})
    keys = child_keys(root, tokens, next_chain(root, tokens))
    assert len(keys) == -(-len(tokens) // STEP)
    assert all(len(key) == 16 + 4 * STEP + 16 for key in keys)
    assert keys[0].startswith(root)


def test_ids_that_do_not_fit_are_refused():
    with pytest.raises(OverflowError):
        next_chain(b"\0" * 16, [2**32])
    with pytest.raises(OverflowError):
        next_chain(b"\0" * 16, [-1])
