"""CPU time of a daemon: its front and its workers."""

from __future__ import annotations

import psutil

from rig.daemon import Daemon


def processes(daemon: Daemon) -> list[psutil.Process]:
    """Front first, then the workers of the models that are loaded now."""
    assert daemon.process is not None
    return [psutil.Process(pid) for pid in (daemon.process.pid, *daemon.worker_pids())]


def cpu_seconds(these: list[psutil.Process]) -> float:
    return sum(p.cpu_times().user + p.cpu_times().system for p in these)
