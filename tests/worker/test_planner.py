"""Restoring and recomputing are compared only by what was measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.worker.planner import REAL_BYTES, SAVED, Rates, fit, meet

MB = 2**20


def recompute_is_cheaper(rates: Rates, start: int, end: int, nbytes: int) -> bool:
    return meet(rates, start, [(start, nbytes), (end, 0)]) == end


def test_nothing_is_claimed_before_both_were_measured_on_real_sizes() -> None:
    rates = Rates()
    assert not recompute_is_cheaper(rates, 0, 1000, 100 * MB)
    rates.prefilled(0, 512, 0.0001)
    assert not recompute_is_cheaper(rates, 0, 1000, 100 * MB)
    rates.restored(REAL_BYTES - 1, 100.0)
    assert not recompute_is_cheaper(rates, 0, 1000, 100 * MB)
    rates.restored(REAL_BYTES, 100.0)
    assert recompute_is_cheaper(rates, 0, 1000, 100 * MB)


def test_short_chunks_say_nothing() -> None:
    rates = Rates()
    rates.prefilled(0, 1, 0.5)
    assert rates.prefill_s(0, 100) is None
    assert rates.row_s is None


def test_rows_cost_more_the_deeper_they_lie() -> None:
    rates = Rates()
    for start in range(0, 4096, 512):
        rates.prefilled(start, 512, 512 * (0.003 + 4e-6 * (start + 256)))
    rates.restored(10 * MB, 0.1)
    whole = rates.prefill_s(0, 4096)
    assert whole == pytest.approx(4096 * 0.003 + 2e-6 * 4096**2, rel=1e-6)
    shallow, deep = rates.prefill_s(0, 100), rates.prefill_s(3900, 4000)
    assert shallow is not None
    assert deep is not None
    assert deep > 4 * shallow


def test_a_fast_machine_with_a_slow_disk_recomputes_and_a_slow_one_loads() -> None:
    fast, slow = Rates(), Rates()
    fast.prefilled(0, 2048, 0.2)
    slow.prefilled(0, 512, 3.0)
    for rates in (fast, slow):
        rates.restored(100 * MB, 1.0)
    assert recompute_is_cheaper(fast, 0, 2048, 100 * MB)
    assert not recompute_is_cheaper(slow, 0, 2048, 100 * MB)


def rated(row_s: float, bytes_s: float) -> Rates:
    rates = Rates()
    rates.prefilled(0, 512, 512 * row_s)
    rates.restored(100 * MB, 100 * MB / bytes_s)
    return rates


CUTS = [(row, (4096 - row) * 100_000) for row in range(0, 4097, 512)]


def test_where_both_take_the_same_time_they_meet_in_the_middle() -> None:
    assert meet(rated(0.001, 1e8), 0, CUTS) == 2048
    assert meet(rated(0.001, 1e8), 0, CUTS, both=False) == 0
    assert meet(rated(0.001, 0.9e8), 0, CUTS, both=False) == 4096


def test_what_is_slow_gets_the_smaller_part_or_none() -> None:
    assert meet(rated(0.001, 3e8), 0, CUTS) == 1024
    assert meet(rated(0.001, 1e9), 0, CUTS) == 0
    assert meet(rated(0.001, 3e7), 0, CUTS) == 3072
    assert meet(rated(0.001, 1e7), 0, CUTS) == 4096


@given(st.floats(1e-5, 1), st.floats(1e5, 1e10), st.integers(0, 7))
def test_a_cut_is_taken_only_where_it_saves_much_of_either_end(row_s: float, bytes_s: float, first: int) -> None:
    rates, cuts = rated(row_s, bytes_s), CUTS[first:]
    start = cuts[0][0]
    found = meet(rates, start, cuts)
    took = max((found - start) * row_s, (4096 - found) * 100_000 / bytes_s)
    ends = ((4096 - start) * row_s, (4096 - start) * 100_000 / bytes_s)
    assert took <= min(ends) * (1 + 1e-9)
    if found not in (start, 4096):
        assert took < min(ends) * (1 - SAVED) * (1 + 1e-9)


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 10)), max_size=30))
def test_a_fitted_line_is_never_negative(points: list[tuple[float, float]]) -> None:
    line = fit(points)
    assert (line is None) == (not points)
    if line is not None:
        assert line[0] >= 0
        assert line[1] >= 0
