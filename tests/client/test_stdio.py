"""Whether somebody still reads stdout, as the system tells it; macOS has ways of its own."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvclient import stdio


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """(reading, writing), the latter in the place of stdout."""
    reading, writing = os.pipe()
    monkeypatch.setattr(stdio, "STDOUT", writing)
    yield reading, writing
    for fd in (reading, writing):
        try:
            os.close(fd)
        except OSError:
            continue


def test_a_pipe_that_is_read_or_full_is_open_and_one_without_a_reader_is_closed(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    stdio.check_stdout()
    os.set_blocking(writing, False)
    while True:
        try:
            os.write(writing, bytes(4096))
        except BlockingIOError:
            break
    stdio.check_stdout()
    os.close(reading)
    with pytest.raises(stdio.StdoutClosed):
        stdio.check_stdout()


class MacOS:
    """Its poll: nothing about a descriptor of which nothing was asked."""

    state = 0

    def __init__(self) -> None:
        self.asked = 0

    def register(self, fd: int, events: int) -> None:
        self.asked = events

    def poll(self, timeout: int) -> list[tuple[int, int]]:
        return [(1, self.state)] if self.asked and self.state else []


@pytest.mark.parametrize("state", [select.POLLHUP, select.POLLERR, select.POLLNVAL])
def test_a_reader_that_is_gone_is_noticed_on_macos(
    monkeypatch: pytest.MonkeyPatch, pipe: tuple[int, int], state: int
) -> None:
    monkeypatch.setattr(select, "poll", MacOS)
    stdio.check_stdout()
    monkeypatch.setattr(MacOS, "state", state)
    with pytest.raises(stdio.StdoutClosed):
        stdio.check_stdout()


def test_a_device_that_macos_cannot_poll_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "poll", MacOS)
    monkeypatch.setattr(MacOS, "state", select.POLLNVAL)
    with Path(os.devnull).open("w") as null:
        monkeypatch.setattr(stdio, "STDOUT", null.fileno())
        stdio.check_stdout()
