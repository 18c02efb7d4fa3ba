"""How soon things answer. Python's own start is the baseline of the shell helper."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from benches.rows import Row, paired, row
from rig.daemon import Daemon, short_home

ROUNDS = 11


def _seconds(*command: str) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begin


def _front() -> float:
    with short_home() as home:
        daemon = Daemon(home)
        begin = time.perf_counter()
        daemon.start()
        daemon.status()
        seconds = time.perf_counter() - begin
        daemon.stop()
    return seconds


def run() -> list[Row]:
    kv = str(Path(sys.executable).parent / "kv")
    version, bare = paired(lambda: _seconds(kv, "--version"), lambda: _seconds(sys.executable, "-c", ""), ROUNDS)
    imported, _ = paired(
        lambda: _seconds(sys.executable, "-c", "import kvclient; kvclient.Client"), lambda: 0.0, ROUNDS
    )
    front = statistics.median(_front() for _ in range(5))
    return [
        row(
            "kv --version",
            statistics.median(version),
            "s",
            baseline=statistics.median(bare),
            bar="<= 0.150",
            of="value",
        ),
        row("import kvclient", statistics.median(imported), "s", baseline=statistics.median(bare)),
        row("front: start to first status", front, "s", bar="<= 1.0", of="value"),
    ]
