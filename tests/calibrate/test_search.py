"""The search for a table: pure, against a full enumeration of small cases."""

from __future__ import annotations

import itertools

import pytest

from kvd.calibrate.search import LADDER, Costs, Table, descend, lightest, within

GROWTH = {8: 0.004, 6: 0.06, 5: 0.25, 4: 1.0}


def costs(k: list[float], v: list[float]) -> Costs:
    layers = len(k)
    return Costs(
        at_anchor={("k", i): x for i, x in enumerate(k)} | {("v", i): x for i, x in enumerate(v)},
        growth={(side, bits): growth for side in ("k", "v") for bits, growth in GROWTH.items()},
        nbytes={(side, i, bits): 8 * bits + 8 for side in ("k", "v") for i in range(layers) for bits in LADDER},
        layers=layers,
    )


def test_the_path_goes_from_the_top_of_the_ladder_to_its_end_one_step_at_a_time() -> None:
    found = costs([3.0, 1.0], [0.5, 0.2])
    path = descend(found)
    assert path[0] == ((8, 8), (8, 8)) and path[-1] == ((4, 4), (4, 4))
    assert len(path) == 1 + 4 * (len(LADDER) - 1)
    sizes = [found.bytes_of(table) for table in path]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes)


def test_the_sensitive_side_and_layer_keep_their_bits_longest() -> None:
    found = costs([0.01, 10.0, 0.01], [0.001, 0.001, 0.001])
    table = within(descend(found), found, found.bytes_of(((4, 4), (8, 4), (4, 4))))
    assert table is not None and table[1][0] == 8
    assert all(bits == 4 for i, pair in enumerate(table) for side, bits in enumerate(pair) if (i, side) != (1, 0))


@pytest.mark.parametrize("share", [0.55, 0.7, 0.9])
def test_a_table_within_a_budget_is_close_to_the_best_there_is(share: float) -> None:
    found = costs([0.02, 0.3, 0.05], [0.01, 0.004, 0.03])
    budget = int(found.bytes_of(((8, 8),) * 3) * share) + 8
    every: list[Table] = [tuple(pairs) for pairs in itertools.product(itertools.product(LADDER, LADDER), repeat=3)]
    best = min(found.predicted(table) for table in every if found.bytes_of(table) <= budget)
    table = within(descend(found), found, budget)
    assert table is not None and found.bytes_of(table) <= budget
    assert found.predicted(table) <= 1.6 * best


def test_a_budget_below_every_table_has_none() -> None:
    found = costs([1.0], [1.0])
    assert within(descend(found), found, 10) is None


def test_the_lightest_table_stays_below_the_limit() -> None:
    found = costs([0.02, 0.3], [0.01, 0.004])
    path = descend(found)
    table = lightest(path, found, 0.02)
    assert table is not None and found.predicted(table) <= 0.02
    behind = path[path.index(table) + 1]
    assert found.predicted(behind) > 0.02
    assert lightest(path, found, 0.0) is None
