"""The table and the plot."""

from __future__ import annotations

import xml.etree.ElementTree as tree

from kvd.calibrate.plot import svg
from kvd.calibrate.table import lines
from tests.calibrate.support import calibration

SPACE = "{http://www.w3.org/2000/svg}"


def test_the_plot_is_svg_with_a_point_for_every_setting_but_native() -> None:
    root = tree.fromstring(svg(calibration(model="a<b&c", text="x > y")))
    points = root.findall(f"{SPACE}circle")
    assert [point.get("class") for point in points] == ["ok", "bad"]
    good, bad = points
    assert float(good.get("cx") or 0) > float(bad.get("cx") or 0)
    assert float(good.get("cy") or 0) > float(bad.get("cy") or 0), "less divergence is lower"
    words = " ".join(text.text or "" for text in root.iter(f"{SPACE}text"))
    assert "a<b&c" in words and "gate: 0.01" in words and "8,192 tokens" in words


def test_the_plot_of_native_alone_is_still_svg() -> None:
    tree.fromstring(svg(calibration(settings=calibration().settings[:1])))


def test_the_table_says_what_was_measured_on_what_and_who_passed() -> None:
    text = "\n".join(lines(calibration()))
    for words in ("8,192 tokens of a text", "k8v8", "28%", "0.0004", "99.0%", "passed", "failed", "K 4 bits",
                  "most sensitive: layers 1 (74%), 0 (26%)", "--kv auto` takes k8v8", "as it is done"):  # fmt: skip
        assert words in text, words
    assert "shorter" not in text


def test_a_short_measurement_says_that_it_is_one() -> None:
    assert "shorter than the 8,192 tokens" in "\n".join(lines(calibration(tokens=2048)))
