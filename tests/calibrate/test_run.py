"""A whole calibration of a tiny model, in this process."""

from __future__ import annotations

from typing import Any

import pytest

from kvclient.errors import BadRequest
from kvd.cache.inspection import inspect_layout
from kvd.cache.paths import Paths
from kvd.calibrate import plan as plans
from kvd.calibrate.material import Material, Probe
from kvd.calibrate.result import Gate
from kvd.calibrate.run import Findings, Run, choose_best, common
from kvd.calibrate.trial import Means
from tests.cache.support import model, prompt
from tests.calibrate.support import BAD, GOOD, setting


def calibrate(presets: list[str], budget: int | None = None, gate: Gate = Gate(), **options: Any) -> Findings:  # noqa: B008
    net = model(**options)
    ids = prompt(280, 4)
    material = Material(
        tuple(ids[:240]), tuple(ids[240:]), None, (Probe(tuple(ids[:6]), 2),), (tuple(prompt(5, 1)),), (("x",),)
    )
    layout = inspect_layout(net)
    plan = plans.make(presets, len(layout.layers), material.tokens, len(material.window))
    means = Means(net, Paths(), block=16, chunk=64, stops=frozenset({2}), tick=lambda rows: None)
    return Run(means, layout, material, plan, gate, str, lambda what: None).everything(budget)


def test_everything_is_measured_and_more_bits_cost_less() -> None:
    found = calibrate(["k8v8", "k4v4"])
    by_name = {item.name: item for item in found.settings}
    assert list(by_name)[:3] == ["native", "k8v8", "k4v4"]
    assert by_name["native"].quality.kld_mean == 0.0
    assert by_name["k8v8"].quality.kld_mean < by_name["k4v4"].quality.kld_mean
    assert by_name["k8v8"].bytes_per_token > by_name["k4v4"].bytes_per_token
    assert len(found.sides) == 8 and [item.layer for item in found.layers] == [0, 1]
    for side in ("k", "v"):
        alone = {item.bits: item.quality.kld_mean for item in found.sides if item.side == side}
        assert alone[8] < alone[6] < alone[4]
    assert all(item.k > 0 and item.v > 0 for item in found.layers)


def test_the_table_for_a_budget_keeps_to_it_and_is_measured_in_full() -> None:
    least = calibrate(["k4v4"]).settings[1].bytes_per_token
    found = calibrate(["k8v8", "k4v4"], budget=least + 40, gate=Gate(max_kld=1.0, min_same_top=0.0))
    best = next(item for item in found.settings if item.name == found.best)
    assert best.bytes_per_token <= least + 40
    four = next(item for item in found.settings if item.name == "k4v4")
    assert best.quality.kld_mean <= four.quality.kld_mean


def test_a_budget_that_nothing_fits_is_refused_with_the_least_there_is() -> None:
    with pytest.raises(BadRequest, match="the least is 192"):
        calibrate(["k4v4"], budget=10)


def test_a_head_size_that_no_group_divides_is_refused_by_its_constraint() -> None:
    with pytest.raises(BadRequest, match="head size 48 is not a multiple of the group"):
        calibrate(["k8v8"], heads=2, kv_heads=2, head_dim=48)


def test_a_preset_that_does_not_fit_is_left_out_and_said() -> None:
    found = calibrate(["k8v8g64", "k8v8"])
    assert [item.name for item in found.settings][:2] == ["native", "k8v8"]
    assert "k8v8g64 left out: K in groups of 64: the head size 32" in found.warnings[0]


def test_the_best_is_the_smallest_that_passes_or_the_closest_within_a_budget() -> None:
    items = [setting("native", 400, GOOD), setting("k8v8", 130, GOOD), setting("k8v4", 100, GOOD),
             setting("k4v4", 70, BAD)]  # fmt: skip
    assert choose_best(items, Gate(), None) == "k8v4"
    assert choose_best(items, Gate(), 120) == "k8v4"
    assert choose_best(items, Gate(), 80) == ""
    assert choose_best(items, Gate(max_kld=1.0, min_same_top=0.5), None) == "k4v4"


def test_common_counts_leading_tokens() -> None:
    assert (common([1, 2, 3], [1, 2, 4]), common([], [1]), common([1, 2], [1, 2])) == (2, 0, 2)
