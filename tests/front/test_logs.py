"""The log on a terminal: everything in front, warnings only in the background; the file has all of it."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from kvd.front import logs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2


@pytest.mark.parametrize("front", [True, False])
def test_a_daemon_in_the_background_keeps_out_of_the_terminals_way(
    front: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp() + (0 if front else 1))
    logs.start(tmp_path, "info")
    try:
        logs.logger.info("calm")
        logs.logger.warning("trouble")
    finally:
        logs.stop()
    assert ("calm" in screen.getvalue()) is front
    assert "trouble" in screen.getvalue()
    text = (tmp_path / logs.FILE).read_text()
    assert "calm" in text and "trouble" in text
