"""The table of stored blocks keeps its sums and its tree."""

from __future__ import annotations

import pytest

from kvd.store.table import Slot, Table

ROOT = b"r" * 16


def slot(name: bytes, parent: bytes = ROOT) -> Slot:
    return Slot(ROOT, name, parent, b"", 4, 0, 90, 100, 0, 0.0, 0.0, "")


def test_a_block_is_found_in_its_own_namespace_only() -> None:
    table = Table()
    table.add(slot(b"a"))
    assert table.get(ROOT, b"a") and table.get(b"x" * 16, b"a") is None
    with pytest.raises(KeyError):
        table.add(slot(b"a"))


def test_sums_are_those_of_what_is_there() -> None:
    table = Table()
    for name in (b"a", b"b"):
        table.add(slot(name))
    table.remove(b"a")
    assert (len(table), table.bytes, table.tokens, table.by_namespace) == (1, 100, 4, {ROOT: 100})
    table.remove(b"b")
    assert (table.bytes, table.tokens, table.by_namespace, table.children) == (0, 0, {}, {})


def test_what_lost_an_ancestor_is_a_stray_with_all_below_it() -> None:
    table = Table()
    for name, parent in ((b"a", ROOT), (b"b", b"a"), (b"c", b"b"), (b"d", b"c"), (b"e", b"a")):
        table.add(slot(name, parent))
    assert [s.chain for s in table.path(b"d")] == [b"d", b"c", b"b", b"a"] and not table.strays()
    table.remove(b"b")
    assert table.strays() == {b"c", b"d"} and table.below([b"c"]) == [b"c", b"d"]
