"""Who leaves first."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvd.store.evict import classes, plan
from kvd.store.table import Slot, Table

ROOT = b"r" * 16


def slot(name: str, parent: str = "", *, hits: int = 0, used: float = 0.0, disk: int = 10, start: int = 0) -> Slot:
    chain = name.encode().ljust(16)
    above = parent.encode().ljust(16) if parent else ROOT
    return Slot(ROOT, chain, above, b"", 4, start, disk, disk, hits, used, used, "")


def names(slots: list[Slot]) -> list[str]:
    return [s.chain.decode().strip() for s in slots]


def gone(slots: list[Slot], need: int, held: Sequence[str] = (), strays: Sequence[str] = ()) -> list[str]:
    def keys(these: Sequence[str]) -> set[bytes]:
        return {n.encode().ljust(16) for n in these}

    return names(plan(slots, need, keys(held), keys(strays), 100))


def test_children_leave_before_their_parents() -> None:
    path = [slot("a", used=1), slot("b", "a", used=2), slot("c", "b", used=3)]
    assert gone(path, 30) == ["c", "b", "a"]
    assert gone(path, 11) == ["c", "b"]


def test_the_least_recently_used_leaf_leaves_first() -> None:
    assert gone([slot("a", used=3), slot("b", used=1), slot("c", used=2)], 20) == ["b", "c"]


def test_of_a_path_used_at_once_the_deepest_block_leaves_first() -> None:
    assert gone([slot("a", used=1), slot("z", used=1, start=8), slot("b", used=1, start=4)], 10) == ["z"]


def test_what_was_seen_once_leaves_before_what_was_reused() -> None:
    assert gone([slot("old", hits=1, used=1), slot("new", used=9)], 10) == ["new"]


def test_what_was_reused_long_ago_gives_way_once_reused_blocks_fill_the_store() -> None:
    reused = [slot(f"r{n}", hits=1, used=n) for n in range(9)]
    assert gone([*reused, slot("new", used=99)], 10) == ["r0"]


def test_what_cannot_be_reached_leaves_before_everything() -> None:
    assert gone([slot("s", "lost", hits=5, used=99), slot("a", used=1)], 10, strays="s") == ["s"]


def test_held_blocks_and_their_ancestors_stay() -> None:
    path = [slot("a"), slot("b", "a"), slot("c", "b"), slot("d", "b"), slot("e")]
    assert gone(path, 1000, held="c") == ["d", "e"]


def test_nothing_leaves_when_nothing_is_needed() -> None:
    assert gone([slot("a")], 0) == [] == gone([slot("a")], -5)


@given(
    st.lists(st.tuples(st.integers(-1, 30), st.integers(0, 3), st.integers(0, 9)), max_size=31),
    st.integers(0, 400), st.sets(st.integers(0, 30), max_size=4),
)  # fmt: skip
def test_what_stays_can_always_be_reached(tree: list[tuple[int, int, int]], need: int, pins: set[int]) -> None:
    table = Table()
    for n, (parent, hits, used) in enumerate(tree):
        table.add(slot(str(n), str(parent) if 0 <= parent < n else "", hits=hits, used=used))
    held = {str(p).encode().ljust(16) for p in pins if p < len(tree)}
    before = {c: [s.chain for s in table.path(c)] for c in held}
    victims = plan(list(table), need, held, table.strays(), 100)
    for victim in victims:
        assert victim.chain not in table.children
        table.remove(victim.chain)
    assert not table.strays()
    assert {c: [s.chain for s in table.path(c)] for c in held} == before
    assert sum(v.disk for v in victims) >= need or all(s.chain in table.children or s.chain in held for s in table)
    assert sum(v.disk for v in victims[:-1]) < max(need, 1)


def test_protection_is_for_the_most_recent_of_what_was_reused() -> None:
    slots = [slot(str(n), hits=1, used=n) for n in range(10)]
    assert [classes(slots, (), 100)[s.chain] for s in slots] == [1, 1, *[2] * 8]
