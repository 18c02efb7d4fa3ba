"""Single key presses, without waiting for Enter."""

from __future__ import annotations

import select
import sys
import termios
import time
import tty
from types import TracebackType
from typing import Any


class Keys:
    """As a context: the terminal gives keys at once, and is restored at the end. Without a terminal nothing is ever
    pressed."""

    def __init__(self) -> None:
        self._saved: list[Any] | None = None

    def __enter__(self) -> Keys:
        if sys.stdin.isatty():
            self._saved = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        return self

    def pressed(self, key: str, within: float) -> bool:
        """Waits at most `within` seconds for this key; Ctrl-C raises KeyboardInterrupt as ever."""
        if self._saved is None:
            time.sleep(within)
            return False
        until = time.monotonic() + within
        while (left := until - time.monotonic()) > 0:
            if select.select([sys.stdin], [], [], left)[0] and sys.stdin.read(1) == key:
                return True
        return False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._saved is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._saved)
