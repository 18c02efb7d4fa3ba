"""Back-off doubles, stops at its most, forgets after the window."""

from __future__ import annotations

from kvd.front.crashes import Crashes, Policy

POLICY = Policy(delay=1.0, most=4.0, limit=5, window=100.0)


def test_the_first_crash_costs_no_wait_and_later_ones_double_it() -> None:
    crashes = Crashes(POLICY)
    waits = []
    for _ in range(6):
        crashes.add(0.0)
        waits.append(crashes.wait(0.0))
    assert waits == [0.0, 1.0, 2.0, 4.0, 4.0, 4.0]
    assert crashes.wait(3.0) == 1.0 and crashes.wait(5.0) == 0.0


def test_the_model_is_down_at_the_limit_until_the_window_has_passed() -> None:
    crashes = Crashes(POLICY)
    for at in range(5):
        assert not crashes.down(at)
        crashes.add(at)
    assert crashes.down(50.0)
    assert not crashes.down(100.5)
    crashes.clear()
    assert crashes.count(50.0) == 0
