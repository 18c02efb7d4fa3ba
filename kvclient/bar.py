"""One line on a terminal's stderr that tells what the wait is for, and goes away before the answer. Drawn by hand:
importing a library for it would take longer than most waits."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from typing import Final

from kvclient import stdio
from kvclient.events import Progress

PATIENCE_S: Final = 0.3
"""Nothing is shown for shorter waits."""
EVERY_S: Final = 0.1
ERASE: Final = "\r\x1b[2K"


class Bar:
    """`draw` None shows nothing."""

    def __init__(self, draw: Callable[[str], None] | None, now: Callable[[], float] = time.monotonic) -> None:
        self._draw, self._now = draw, now
        self._began = now()
        self._drawn = -1.0
        self._shown = False
        self._grown = 0
        self._first: tuple[float, int] | None = None

    @classmethod
    def for_stderr(cls) -> Bar:
        try:
            usable = os.isatty(stdio.STDERR) and os.environ.get("TERM", "dumb") != "dumb"
        except OSError:
            usable = False
        return cls(stdio.error if usable else None)

    def queued(self, position: int) -> None:
        self._line(f"waiting, {position} before" if position else "waiting for the model")

    def prefill(self, at: Progress) -> None:
        now = self._now()
        self._first = self._first or (now, at.done)
        cached = f", {at.cached} cached" if at.cached else ""
        self._line(f"reading {{}} {at.done}/{at.total} tokens{cached}{self._left(now, at)}", at.done / max(at.total, 1))

    def growing(self, what: str, characters: int) -> None:
        self._grown += characters
        self._line(f"{what}, {self._grown} characters")

    def clear(self) -> None:
        if self._shown and self._draw is not None:
            self._draw(ERASE)
            self._shown = False

    def _left(self, now: float, at: Progress) -> str:
        """Time to go, from the rate since the first progress event (cached tokens cost nothing)."""
        began, start = self._first or (now, at.done)
        if at.done <= start or now - began < 1:
            return ""
        return f", {(now - began) * (at.total - at.done) / (at.done - start):.0f} s left"

    def _line(self, text: str, part: float | None = None) -> None:
        now = self._now()
        if self._draw is None or now - self._began < PATIENCE_S or now - self._drawn < EVERY_S:
            return
        self._drawn, self._shown = now, True
        columns = shutil.get_terminal_size().columns
        if part is not None:
            cells = max(0, min(30, columns - len(text) - 2))
            full = round(min(part, 1.0) * cells)
            text = text.replace("{}", f"[{'#' * full}{'.' * (cells - full)}]" if cells else "", 1)
        self._draw(ERASE + text[: columns - 1])
