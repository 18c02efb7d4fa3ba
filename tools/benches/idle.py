"""CPU use of front and worker at rest with a model loaded."""

from __future__ import annotations

import time

from benches.cpu import cpu_seconds, processes
from benches.rows import Row, row
from rig.daemon import Daemon, demo_models, short_home

SECONDS = 60


def run() -> list[Row]:
    with short_home(demo_models()) as home, Daemon(home) as daemon:
        with daemon.client() as client:
            client.generate("demo", "Once upon a time", max_tokens=4)
        these = processes(daemon)
        before = cpu_seconds(these)
        time.sleep(SECONDS)
        used = 100 * (cpu_seconds(these) - before) / SECONDS
    return [row(f"CPU of front and worker over {SECONDS} s at rest", used, "%", bar="<= 0.5", of="value")]
