"""Sizes and durations as people write and read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.units import format_age, format_duration, format_size, parse_duration, parse_size, with_unit


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("4096", 4096), ("8 GiB", 8 * 2**30), ("8G", 8 * 2**30), ("8 GB", 8 * 10**9), ("1.5 mib", 3 * 2**19)],
)
def test_sizes_are_read_in_binary_and_decimal_units(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "8 apples", "1e9", "8 GiB please"])
def test_what_is_no_size_says_how_to_write_one(text: str) -> None:
    with pytest.raises(ValueError, match="8 GiB"):
        parse_size(text)


def test_a_number_that_is_too_few_bytes_was_meant_in_gigabytes_or_megabytes() -> None:
    assert [with_unit(text) for text in ("8", " 64 ", "4096")] == ["8GB", "64GB", "4096MB"]
    assert [with_unit(text) for text in ("0", "5000000", "10MB", "8.5", "lots")] == [""] * 5


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("250ms", 0.25), ("30s", 30), ("15m", 900), ("2h", 7200), ("7d", 604800)]
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@given(st.integers(0, 1023), st.sampled_from([1, 2**10, 2**20, 2**30, 2**40]))
def test_a_round_size_survives_being_shown(count: int, unit: int) -> None:
    assert parse_size(format_size(count * unit)) == count * unit


def test_sizes_are_short_and_never_in_powers_of_ten() -> None:
    shown = [format_size(count) for count in (1536, 999.7 * 2**20, 1020.3 * 2**20, 1.5 * 2**40, 5000.5 * 2**40)]
    assert shown == ["1.5 KiB", "1000 MiB", "1020 MiB", "1.5 TiB", "5000 TiB"]


@given(st.integers(1, 10_000))
def test_a_duration_survives_being_shown(seconds: int) -> None:
    assert parse_duration(format_duration(seconds)) == seconds
    assert parse_duration(format_duration(seconds / 100_000)) == pytest.approx(seconds / 100_000)


def test_ages_are_rough() -> None:
    assert [format_age(s) for s in (-1, 12, 200, 20_000, 200_000)] == ["0s", "12s", "3m", "6h", "2d"]
    assert [format_age(s) for s in (59.4, 59.9, 3599.9, 86_399)] == ["59s", "1m", "1h", "1d"]
