"""A whole calibration of a tiny model, in this process."""

from __future__ import annotations

import contextlib
from typing import Any

import mlx.core as mx
import pytest

from kvclient.errors import BadRequest
from kvd.cache import precision
from kvd.cache.inspection import inspect_layout
from kvd.cache.layout import KVLayout
from kvd.cache.paths import Paths
from kvd.calibrate import plan as plans
from kvd.calibrate import trial
from kvd.calibrate.material import Material, Probe
from kvd.calibrate.result import Gate
from kvd.calibrate.run import Findings, Run, choose_best
from kvd.calibrate.trial import Setup
from tests.cache.support import model, prompt
from tests.calibrate.support import BAD, GOOD, calibration, setting


def calibrate(
    presets: list[str], budget: int | None = None, gate: Gate = Gate(), known: Findings | None = None,  # noqa: B008
    cast: Any = None, said: list[tuple[str, str]] | None = None, **options: Any,
) -> Findings:  # fmt: skip
    net = model(**options)
    if cast is not None:
        twin = type(net)(net.args)
        twin.update(net.parameters())
        twin.set_dtype(cast)
        net = twin
    ids = prompt(280, 4)
    material = Material(
        tuple(ids[:240]), tuple(ids[240:]), None, (Probe(tuple(ids[:6]), 2),), (tuple(prompt(5, 1)),), (("x",),)
    )
    layout = inspect_layout(net)
    plan = plans.make(presets, len(layout.layers), material.tokens, len(material.window))
    setup = Setup(net, lambda layout: Paths(), block=16, chunk=64, stops=frozenset({2}), tick=lambda: None)
    kept = None if known is None else calibration(settings=known.settings, sides=known.sides, layers=known.layers)

    def say(kind: str, what: str) -> None:
        if said is not None:
            said.append((kind, what))

    return Run(setup, layout, material, plan, gate, budget, str, say, kept).everything()


def test_everything_is_measured_and_more_bits_cost_less() -> None:
    found = calibrate(["k8v8", "k4v4"])
    by_name = {item.name: item for item in found.settings}
    assert [name for name in by_name if name[0] == "n" or name in ("k8v8", "k4v4")] == [
        "native", "native again", "k8v8", "k4v4"
    ]  # fmt: skip
    assert by_name["native"].quality.kld_mean == 0.0
    assert by_name["k8v8"].quality.kld_mean < by_name["k4v4"].quality.kld_mean
    assert by_name["k8v8"].bytes_per_token > by_name["k4v4"].bytes_per_token
    assert len(found.sides) == 8 and [item.layer for item in found.layers] == [0, 1]
    for side in ("k", "v"):
        alone = {item.bits: item.quality.kld_mean for item in found.sides if item.side == side}
        assert alone[8] < alone[6] < alone[4]
    assert all(item.k > 0 and item.v > 0 for item in found.layers)


def test_native_again_shows_rounding_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU rounds alike in every shape, so a device that does not is put in its place."""
    found = calibrate(["k8v8"])
    assert found.settings[1].quality.kld_mean < 1e-6 and found.warnings == ()
    real = trial.window

    def rounding(setup: Setup, filled: Any, tokens: Any, passes: int = 1) -> mx.array:
        out = real(setup, filled, tokens, passes)
        return out if passes == 1 else out.astype(mx.bfloat16).astype(mx.float16)

    monkeypatch.setattr(trial, "window", rounding)
    rounded = calibrate(["k8v8"], gate=Gate(1e-7, 1.0))
    assert rounded.settings[1].quality.kld_mean > 1e-7
    assert rounded.settings[2].quality == found.settings[2].quality
    assert "rounding in float32 hides what precisions cost" in rounded.warnings[-1]
    assert choose_best(rounded.settings[:2], Gate(), None) == ""


def test_a_model_in_bfloat16_is_measured_too() -> None:
    found = calibrate(["k8v8", "k4v4"], cast=mx.bfloat16)
    by_name = {item.name: item for item in found.settings}
    assert 0 < by_name["k8v8"].quality.kld_mean < by_name["k4v4"].quality.kld_mean
    assert by_name["native"].bytes_per_token == 512


def test_a_second_run_takes_over_what_the_first_measured() -> None:
    first = calibrate(["k8v8", "k4v4"])
    said: list[tuple[str, str]] = []
    assert calibrate(["k8v8", "k4v4"], known=first, said=said) == first and said == []
    wider = calibrate(["k8v8", "k6v6"], known=first, said=said)
    assert said == [("native", "native"), ("preset", "k6v6")]
    assert {item.name for item in wider.settings} == {*(item.name for item in first.settings), "k6v6"}
    said.clear()
    least = next(item.bytes_per_token for item in first.settings if item.name == "k4v4")
    tight = calibrate(["k8v8", "k4v4"], budget=least + 40, known=first, said=said)
    assert said == [("native", "native"), ("table", "table 1 of the search")]
    assert len(tight.settings) == len(first.settings) + 1


def test_layers_cost_the_same_whether_those_before_them_run_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    resumed = calibrate(["k8v8"]).layers
    monkeypatch.setattr("kvd.calibrate.resume.Resume.at", lambda self, first: contextlib.nullcontext())
    assert calibrate(["k8v8"]).layers == resumed


def test_the_paths_of_a_pool_are_those_checked_for_its_layout() -> None:
    """A device may read quantised rows wrong by a path that is right for native ones."""
    net = model()
    layout = inspect_layout(net)
    asked = []

    def paths(layout: KVLayout) -> Paths:
        asked.append(layout)
        return Paths(table=layout.native)

    ids = prompt(280, 4)
    material = Material(tuple(ids[:240]), tuple(ids[240:]), None, (), (tuple(prompt(5, 1)),), ((),))
    setup = Setup(net, paths, block=16, chunk=64, stops=frozenset(), tick=lambda: None)
    for name in ("native", "k8v8"):
        filled = trial.prefill(setup, precision.apply(layout, name), material)
        assert filled.cache.paths == Paths(table=name == "native")
    assert asked == [layout, precision.apply(layout, "k8v8")]


def test_the_table_for_a_budget_keeps_to_it_and_is_measured_in_full() -> None:
    least = calibrate(["k4v4"]).settings[2].bytes_per_token
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
    assert [item.name for item in found.settings][:3] == ["native", "native again", "k8v8"]
    assert "k8v8g64 left out: K in groups of 64: the head size 32" in found.warnings[0]


def test_a_preset_whose_logits_are_no_numbers_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    real = trial.window

    def broken(setup: Setup, filled: Any, tokens: Any, passes: int = 1) -> mx.array:
        out = real(setup, filled, tokens, passes)
        return out * float("nan") if filled.cache.layout.describe().count("6g32") == 4 else out

    monkeypatch.setattr(trial, "window", broken)
    found = calibrate(["k8v8", "k6v6"])
    assert "k6v6" not in [item.name for item in found.settings]
    assert found.warnings == ("k6v6 left out: the model's logits are not finite",)


def test_the_best_is_the_smallest_that_passes_or_the_closest_within_a_budget() -> None:
    items = [setting("native", 400, GOOD), setting("k8v8", 130, GOOD), setting("k8v4", 100, GOOD),
             setting("k4v4", 70, BAD)]  # fmt: skip
    assert choose_best(items, Gate(), None) == "k8v4"
    assert choose_best(items, Gate(), 120) == "k8v4"
    assert choose_best(items, Gate(), 80) == ""
    assert choose_best(items, Gate(max_kld=1.0, min_same_top=0.5), None) == "k4v4"
