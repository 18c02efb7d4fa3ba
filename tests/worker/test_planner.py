"""Restoring and recomputing are compared only by what was measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.worker.planner import REAL_BYTES, Rates, fit, recompute_is_cheaper

MB = 2**20


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


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 10)), max_size=30))
def test_a_fitted_line_is_never_negative(points: list[tuple[float, float]]) -> None:
    line = fit(points)
    assert (line is None) == (not points)
    if line is not None:
        assert line[0] >= 0
        assert line[1] >= 0
