"""CPU use of front and worker at rest with a model loaded."""

from __future__ import annotations

import time

import psutil

from benches.rows import Row, row
from rig.daemon import Daemon, demo_models, short_home

SECONDS = 60


def _cpu(processes: list[psutil.Process]) -> float:
    return sum(p.cpu_times().user + p.cpu_times().system for p in processes)


def run() -> list[Row]:
    with short_home(demo_models()) as home, Daemon(home) as daemon:
        with daemon.client() as client:
            client.generate("demo", "Once upon a time", max_tokens=4)
        assert daemon.process is not None
        processes = [psutil.Process(pid) for pid in (daemon.process.pid, *daemon.worker_pids())]
        before = _cpu(processes)
        time.sleep(SECONDS)
        used = 100 * (_cpu(processes) - before) / SECONDS
    return [row(f"CPU of front and worker over {SECONDS} s at rest", used, "%", bar="<= 0.5", of="value")]
