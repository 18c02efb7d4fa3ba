"""The daemon's beginning and end: workers of a front that was killed, signals, the order of stopping."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvd.front.logs import logger
from kvd.front.spawn import FRONT
from kvd.home import Home

OLD_WORKER_S = 3.0
"""how long an orphaned worker may take to notice by itself"""
LOOK_S = 0.02
STDERR = 2


def wait_for_old_workers(home: Home, patience_s: float = OLD_WORKER_S) -> int:
    """Return when no worker of an earlier front lives any more: they might still write into the store. Who outstays
    `patience_s` is killed. Returns how many records were found. Blocks: not for the loop's thread."""
    records = [path for path in home.workers.iterdir() if not path.name.startswith(FRONT)]
    deadline = time.monotonic() + patience_s
    for record in records:
        while not _gone(record):
            if time.monotonic() > deadline:
                _kill(record)
            time.sleep(LOOK_S)
        record.unlink(missing_ok=True)
    return len(records)


def clear_tmp(home: Home) -> None:
    """Private folders that killed workers left behind, and killed calibrations: a running one holds a lock on its."""
    for left in home.tmp.iterdir():
        if not left.name.startswith(FRONT) and _gone(left):
            shutil.rmtree(left, ignore_errors=True)


def _gone(record: Path) -> bool:
    """A worker holds a lock on its record for as long as it lives."""
    try:
        fd = os.open(record, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def _kill(record: Path) -> None:
    text = record.read_text().strip()
    if text.isdigit():
        logger.warning("old worker killed", pid=int(text))
        with suppress(ProcessLookupError):
            os.kill(int(text), signal.SIGKILL)


class Stop:
    """The wish to stop. The first SIGTERM, SIGINT or `shutdown` drains; a second signal ends everything at once."""

    def __init__(self, default_drain_s: Callable[[], float], at_once: Callable[[], None]) -> None:
        self._default, self._at_once = default_drain_s, at_once
        self._wanted = asyncio.Event()
        self.drain_s = 0.0

    def install(self, reload: Callable[[], object]) -> None:
        """SIGHUP is a wish to read the configuration again, unless it says that our terminal is gone."""
        loop, terminal = asyncio.get_running_loop(), os.isatty(STDERR)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signal)
        loop.add_signal_handler(signal.SIGHUP, lambda: self.ask() if terminal and not os.isatty(STDERR) else reload())

    def ask(self, drain_s: float | None = None) -> None:
        """Begin to stop; asked again, with another drain time, only a shorter one counts."""
        drain_s = self._default() if drain_s is None else drain_s
        self.drain_s = min(self.drain_s, drain_s) if self._wanted.is_set() else drain_s
        self._wanted.set()

    @property
    def wanted(self) -> bool:
        return self._wanted.is_set()

    async def wait(self) -> float:
        """Until somebody asks; returns the drain time in seconds."""
        await self._wanted.wait()
        return self.drain_s

    def _signal(self) -> None:
        if self._wanted.is_set():
            logger.warning("stop at once")
            self._at_once()
        else:
            logger.info("stop", drain_s=self._default())
            self.ask()
