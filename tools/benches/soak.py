"""Two thousand short requests from three clients, one in five cancelled: what is left over afterwards."""

from __future__ import annotations

import random
import sys
import threading
import time
from pathlib import Path

import psutil

from benches.rows import Row, row
from kvd.models.record import Record, write_record
from rig.daemon import Daemon, short_home

REQUESTS, CLIENTS, WARM = 2000, 3, 500
PROMPTS = 300
"""different ones: the store's index grows with what is stored, and that is no leak"""
MB = 1e6


def run() -> list[Row]:
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from tests.tiny import tiny_model

    with short_home() as home:
        folder = tiny_model(home / "models" / "tiny")
        write_record(folder, Record("tiny", "random weights", time.time()))
        with Daemon(home, "--cache-pool", "64MB") as daemon:
            return _soak(daemon)


def _soak(daemon: Daemon) -> list[Row]:
    with daemon.client() as client:
        client.load("tiny")
    assert daemon.process is not None
    processes = {"front": psutil.Process(daemon.process.pid), "worker": psutil.Process(daemon.worker_pids()[0])}
    done = iter(range(REQUESTS))
    lock = threading.Lock()
    samples: list[tuple[int, dict[str, int], int]] = []

    def one(seed: int) -> None:
        rng = random.Random(seed)
        with daemon.client() as client:
            while True:
                with lock:
                    number = next(done, None)
                    if number is None:
                        return
                    if number % 50 == 0:
                        sizes = {name: _private(p) for name, p in processes.items()}
                        samples.append((number, sizes, sum(p.num_fds() for p in processes.values())))
                ids = _prompt(number % PROMPTS)
                stop = rng.randrange(1, 8) if rng.random() < 0.2 else 0
                for count, _ in enumerate(client.stream("tiny", tokens=ids, max_tokens=12, durable_wait_ms=0)):
                    if stop and count >= stop:
                        break  # the client cancels a stream that is left

    threads = [threading.Thread(target=one, args=(seed,)) for seed in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    time.sleep(1.5)
    model = daemon.status()["models"][0]
    warm = [s for s in samples if s[0] >= WARM]
    rows = [
        row(f"{name}: memory slope after {WARM} requests", _slope([(n, s[name]) for n, s, _ in warm]) * 1000 / MB,
            "MB per 1,000", bar="<= 1.0", of="value")
        for name in processes
    ]  # fmt: skip
    return [
        *rows,
        row("descriptors, last against first sample", warm[-1][2] - warm[0][2], "fds", bar="<= 8", of="value"),
        row("blocks held by nobody's request", model["blocks_live"], "blocks", bar="== 0", of="value"),
    ]


def _prompt(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(3, 500) for _ in range(rng.randrange(5, 400))]


def _private(process: psutil.Process) -> int:
    """Bytes of its own: without pages of files such as the index, which the system drops when it needs them."""
    rollup = Path(f"/proc/{process.pid}/smaps_rollup")
    if not rollup.exists():
        return int(process.memory_info().rss)
    line = next(line for line in rollup.read_text().splitlines() if line.startswith("Anonymous:"))
    return int(line.split()[1]) * 1024


def _slope(points: list[tuple[int, int]]) -> float:
    """Least squares."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
