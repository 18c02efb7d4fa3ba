"""What a load takes for `auto`, and when it warns."""

from __future__ import annotations

from pathlib import Path

from kvd.calibrate import result
from kvd.calibrate.choice import choose
from tests.calibrate.support import calibration


def test_native_is_never_warned_about(tmp_path: Path) -> None:
    assert choose("native", tmp_path, "demo", "abc") == choose("native", tmp_path / "none", "demo", "")
    assert choose("native", tmp_path, "demo", "abc").warnings == ()


def test_auto_takes_the_best_table_that_passed(tmp_path: Path) -> None:
    result.save(tmp_path, calibration())
    found = choose("auto", tmp_path, "demo", "abc")
    assert (found.text, found.warnings) == ("k8v8", ())


def test_auto_stays_native_and_says_why_where_nothing_was_measured_or_passed(tmp_path: Path) -> None:
    found = choose("auto", tmp_path, "demo", "abc")
    assert found.text == "native" and "kvd calibrate demo" in found.warnings[0]
    result.save(tmp_path, calibration(best=""))
    found = choose("auto", tmp_path, "demo", "abc")
    assert found.text == "native" and "nothing passed" in found.warnings[0]
    result.save(tmp_path, calibration(best="", budget=9000))
    assert "nothing within 9,000 bytes per token passed" in choose("auto", tmp_path, "demo", "abc").warnings[0]


def test_a_result_of_other_weights_does_not_count(tmp_path: Path) -> None:
    result.save(tmp_path, calibration())
    found = choose("auto", tmp_path, "demo", "other")
    assert found.text == "native" and "other weights" in found.warnings[0]


def test_a_damaged_result_is_told_and_loads_go_on(tmp_path: Path) -> None:
    (tmp_path / result.FILE).write_text('{"version": 1, "settings": [')
    for asked, text in (("auto", "native"), ("k8v8", "k8v8")):
        found = choose(asked, tmp_path, "demo", "abc")
        assert found.text == text and "cannot be read" in found.warnings[0]


def test_a_preset_that_failed_its_gate_warns_with_its_numbers(tmp_path: Path) -> None:
    result.save(tmp_path, calibration())
    found = choose("k4v4", tmp_path, "demo", "abc")
    assert found.text == "k4v4"
    for number in ("0.02", "93.0%", "0.01", "97%", "8,192"):
        assert number in found.warnings[0]


def test_a_preset_that_passed_is_not_warned_about_and_an_unmeasured_one_is(tmp_path: Path) -> None:
    result.save(tmp_path, calibration())
    assert choose("k8v8", tmp_path, "demo", "abc").warnings == ()
    assert "not been measured" in choose("k6v6", tmp_path, "demo", "abc").warnings[0]


def test_a_measurement_behind_a_short_text_says_so(tmp_path: Path) -> None:
    result.save(tmp_path, calibration(tokens=1024))
    assert "1,024 tokens only" in choose("k8v8", tmp_path, "demo", "abc").warnings[0]
    result.save(tmp_path, calibration(tokens=1024, context=1024))
    assert choose("k8v8", tmp_path, "demo", "abc").warnings == ()
