"""The file that keeps a calibration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvd.calibrate import result
from kvd.calibrate.result import Gate, Quality
from tests.calibrate.support import calibration


def test_what_is_kept_is_what_was_found(tmp_path: Path) -> None:
    made = calibration(budget=9000, warnings=("short text",))
    result.save(tmp_path, made)
    assert result.stored(tmp_path) == made
    assert [path.name for path in tmp_path.iterdir()] == [result.FILE]


def test_without_a_file_there_is_no_result(tmp_path: Path) -> None:
    assert result.stored(tmp_path) is None


@pytest.mark.parametrize("damage", [lambda raw: raw.pop("gate"), lambda raw: raw["settings"][0].pop("quality"),
                                    lambda raw: raw.update(version=9), lambda raw: raw.update(layers=3)])  # fmt: skip
def test_a_damaged_file_is_a_value_error(tmp_path: Path, damage) -> None:
    raw = json.loads(result.dumps(calibration()))
    damage(raw)
    (tmp_path / result.FILE).write_text(json.dumps(raw))
    with pytest.raises(ValueError):
        result.stored(tmp_path)


@pytest.mark.parametrize(("kld", "top", "passes"), [(0.01, 0.97, True), (0.011, 0.99, False), (0.001, 0.969, False)])
def test_the_gate_needs_both_the_divergence_and_the_top_token(kld: float, top: float, passes: bool) -> None:
    assert Quality(kld, 1.0, top, 1.0).passes(Gate()) is passes
