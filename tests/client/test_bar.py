"""The progress line."""

from __future__ import annotations

import os

import pytest

from kvclient.bar import ERASE, EVERY_S, PATIENCE_S, Bar
from kvclient.events import Progress


class Screen:
    def __init__(self) -> None:
        self.time, self.drawn = 0.0, list[str]()
        self.bar = Bar(self.drawn.append, lambda: self.time)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    monkeypatch.setenv("COLUMNS", "80")
    return Screen()


def test_short_waits_show_nothing(screen: Screen) -> None:
    screen.time = PATIENCE_S / 2
    screen.bar.prefill(Progress(5, 10))
    screen.bar.clear()
    assert screen.drawn == []


def test_prefill_is_a_bar_with_numbers_and_goes_away(screen: Screen) -> None:
    screen.time = PATIENCE_S
    screen.bar.prefill(Progress(512, 1024, 256))
    assert screen.drawn[0].startswith(ERASE + "reading [") and "512/1024 tokens, 256 cached" in screen.drawn[0]
    assert screen.drawn[0].count("#") == screen.drawn[0].count(".")
    screen.bar.clear()
    screen.bar.clear()
    assert screen.drawn[1:] == [ERASE]


def test_it_is_drawn_a_few_times_a_second(screen: Screen) -> None:
    for step in range(1000):
        screen.time = 1 + step / 1000
        screen.bar.prefill(Progress(step, 1000))
    assert len(screen.drawn) <= 1 / EVERY_S + 1


def test_the_time_left_comes_from_the_rate_since_the_cached_part(screen: Screen) -> None:
    screen.bar.prefill(Progress(900, 1000, 900))
    screen.time = 10.0
    screen.bar.prefill(Progress(950, 1000, 900))
    assert "10 s left" in screen.drawn[-1]


@pytest.mark.parametrize("columns", ["20", "3"])
def test_it_never_wraps(screen: Screen, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    screen.time = 5.0
    screen.bar.prefill(Progress(1, 2))
    screen.time = 6.0
    screen.bar.queued(12)
    assert all(len(line) - len(ERASE) < int(columns) for line in screen.drawn)


def test_waiting_and_thinking_say_so(screen: Screen) -> None:
    screen.time = 1.0
    screen.bar.queued(2)
    screen.time = 2.0
    screen.bar.growing("thinking", 40)
    screen.time = 3.0
    screen.bar.growing("thinking", 2)
    assert ["2 before" in screen.drawn[0], "thinking, 42" in screen.drawn[2]] == [True, True]


def test_only_a_terminal_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(os, "isatty", lambda descriptor: False)
    bar = Bar.for_stderr()
    bar.prefill(Progress(1, 2))
    assert bar._draw is None
    monkeypatch.setattr(os, "isatty", lambda descriptor: True)
    assert Bar.for_stderr()._draw is not None
    monkeypatch.setenv("TERM", "dumb")
    assert Bar.for_stderr()._draw is None
