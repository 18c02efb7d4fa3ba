"""How far a calibration is: the seconds left, from an estimate at first, then from what its stages took."""

from __future__ import annotations

import pytest

from kvd.calibrate import plan as plans
from kvd.calibrate.plan import Pace, Stage
from tests.calibrate.support import calibration


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_stages_that_took_longer_than_estimated_scale_the_others() -> None:
    clock = Clock()
    pace = Pace({"native": Stage(1, 10), "preset": Stage(3, 10), "layer": Stage(10, 1)}, clock)
    assert (pace.left, pace.share) == (50, 0)
    pace.begin("native")
    clock.now += 20
    assert pace.share == pytest.approx(20 / 60)
    pace.begin("preset")
    assert pace.left == pytest.approx(2 * (30 + 10))
    clock.now += 30
    pace.begin("preset")
    assert pace.left == pytest.approx(2 * 30 + 10 * 50 / 20)
    clock.now += 30
    pace.begin("layer")
    assert pace.left == pytest.approx(30 + 10 * 80 / 30)


def test_a_stage_that_takes_longer_than_expected_never_gives_time_back() -> None:
    clock = Clock()
    pace = Pace({"native": Stage(1, 10), "preset": Stage(0, 10)}, clock)
    pace.begin("native")
    clock.now += 25
    assert pace.left == 0 and pace.share == 1
    pace.begin("preset")
    clock.now += 1
    assert pace.left == pytest.approx(24), "not planned, but it runs: as long as the others"
    pace.begin("")
    assert pace.left == 0


def test_what_is_known_takes_no_time() -> None:
    plan = plans.make(["native", "k8v8", "k6v6"], 30, 2048, 256)
    stages = plans.stages(plan, 0.003, 0.001, 0.06)
    assert plan.presets == ("k8v8", "k6v6") and stages["native"].count == 2
    assert stages["layer"].seconds < stages["preset"].seconds
    left = plans.remaining(stages, plan, calibration())
    counts = {kind: stage.count for kind, stage in left.items()}
    assert counts == {"native": 1, "preset": 1, "side": 0, "layer": 0, "table": 1}
    assert plans.remaining(stages, plan, None) == stages
