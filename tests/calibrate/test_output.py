"""The table and the plot."""

from __future__ import annotations

import xml.etree.ElementTree as tree

from kvd.calibrate.plot import svg
from kvd.calibrate.result import AGAIN, Quality
from kvd.calibrate.table import lines
from tests.calibrate.support import GOOD, calibration, setting

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


def test_tables_are_numbered_and_spelt_out() -> None:
    names = ("k8v4,0=k8v8", "k6v4,0=k8v8")
    found = calibration(
        settings=(*calibration().settings, *(setting(name, 9000, GOOD) for name in names)), best=names[1]
    )
    text = "\n".join(lines(found))
    assert "table 2: k6v4,0=k8v8" in text and "takes table 2, 9,000 bytes" in text
    assert ">table 1 · 99.0%<" in svg(found)


def test_nothing_within_a_budget_is_said_with_it() -> None:
    assert "Nothing within 9,000 bytes per token passed" in "\n".join(lines(calibration(best="", budget=9000)))


def test_rounding_is_a_line_of_the_plot_and_no_point_of_it() -> None:
    noisy = setting(AGAIN, 46080, Quality(0.002, 0.01, 0.99, 1.0))
    drawn = svg(calibration(settings=(*calibration().settings, noisy)))
    assert 'class="noise"' in drawn and drawn.count("<circle") == 2
    assert 'class="noise"' not in svg(calibration())


def test_a_short_measurement_says_that_it_is_one() -> None:
    assert "shorter than the 8,192 tokens" in "\n".join(lines(calibration(tokens=2048)))
