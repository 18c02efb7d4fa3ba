"""Which tables are measured: lighter ones first, better ones as long as they do not pass."""

from __future__ import annotations

import pytest

from kvclient.errors import BadRequest
from kvd.cache import precision
from kvd.cache.layout import KVLayout, LayerKV
from kvd.calibrate.plan import TRIES
from kvd.calibrate.proposals import Proposals, check_budget, costs_of
from kvd.calibrate.result import Gate, LayerCost, OneSided, Quality, Setting
from tests.calibrate.support import setting

LAYOUT = KVLayout(tuple(LayerKV(2, 64, 64) for _ in range(6)), "float32")
GROWTH = {8: 0.01, 6: 0.1, 5: 0.4, 4: 1.0}
SIDES = [
    OneSided(side, bits, Quality(0.02 * growth * share, 0.1, 0.9, 1.0))
    for side, share in (("k", 1.0), ("v", 0.1)) for bits, growth in GROWTH.items()
]  # fmt: skip
LAYERS = [LayerCost(i, 0.001 * (i + 1), 0.0001 * (i + 1), 4) for i in range(6)]
COSTS = costs_of(LAYOUT, SIDES, LAYERS)


def measured(name: str, kld: float, same: float) -> Setting:
    return setting(name, precision.apply(LAYOUT, name).bytes_per_token(), Quality(kld, 0.1, same, 1.0))


def run(kld: float, same: float, budget: int | None = None) -> list[str]:
    """Names proposed while each is measured at these."""
    proposals, found = Proposals(LAYOUT, COSTS, Gate(), budget), [measured("k8v8", 1e-5, 1.0)]
    while (name := proposals.following(found)) is not None:
        found.append(measured(name, kld, same))
    return [item.name for item in found[1:]]


def test_the_first_that_passes_is_the_last() -> None:
    assert len(run(0.005, 0.98)) == 1


@pytest.mark.parametrize(("kld", "same"), [(0.02, 0.99), (0.005, 0.94)])
def test_what_does_not_pass_is_followed_by_larger_tables(kld: float, same: float) -> None:
    sizes = [precision.apply(LAYOUT, name).bytes_per_token() for name in run(kld, same)]
    assert len(sizes) == TRIES and sizes == sorted(set(sizes))


def test_the_more_is_lacking_the_larger_the_next_one() -> None:
    near, far = run(0.011, 0.99)[1], run(0.05, 0.99)[1]
    assert precision.apply(LAYOUT, near).bytes_per_token() < precision.apply(LAYOUT, far).bytes_per_token()


def test_presets_that_cost_more_than_predicted_make_the_first_table_larger() -> None:
    def first(kld: float) -> int:
        name = Proposals(LAYOUT, COSTS, Gate(), None).following([measured("k4v4", kld, 0.9)])
        assert name is not None
        return precision.apply(LAYOUT, name).bytes_per_token()

    assert first(0.02) < first(0.2)


def test_within_a_budget_there_is_one_table_and_it_keeps_to_it() -> None:
    budget = precision.apply(LAYOUT, "k6v5").bytes_per_token()
    [name] = run(0.5, 0.5, budget)
    assert precision.apply(LAYOUT, name).bytes_per_token() <= budget


def test_a_budget_below_every_table_is_refused_with_the_least() -> None:
    least = precision.apply(LAYOUT, "k4v4").bytes_per_token()
    check_budget(LAYOUT, least)
    check_budget(LAYOUT, None)
    with pytest.raises(BadRequest, match=f"the least is {least:,}"):
        check_budget(LAYOUT, least - 1)
