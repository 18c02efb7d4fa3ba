"""What storing costs a first request: CPU seconds of front and worker for a prefill with the store on and off."""

from __future__ import annotations

import statistics

import psutil

from benches.reuse import real_text_ids
from benches.rows import Row, median_ratio, paired, row
from rig.daemon import Daemon, demo_models, short_home

ROUNDS, LENGTH = 7, 1025


def run() -> list[Row]:
    models = demo_models()
    ids = real_text_ids(models, LENGTH)
    with short_home(models) as home, Daemon(home) as daemon, daemon.client() as client:
        client.load("demo")
        assert daemon.process is not None
        processes = [psutil.Process(pid) for pid in (daemon.process.pid, *daemon.worker_pids())]
        numbers = iter(range(1000, 2000))

        def prefill(mode: str) -> float:
            prompt = [next(numbers), *ids[1:]]  # nothing in common with any before
            before = _cpu(processes)
            client.generate("demo", tokens=prompt, max_tokens=1, temperature=0.0, cache=mode, durable_wait_ms=20_000)
            return _cpu(processes) - before

        prefill("use"), prefill("read")
        stored, plain = paired(lambda: prefill("use"), lambda: prefill("read"), ROUNDS)
    return [
        row(f"prefill of {LENGTH} with the store on: CPU seconds", statistics.median(stored), "s",
            baseline=statistics.median(plain)),
        row(f"prefill of {LENGTH}: median ratio of {ROUNDS} pairs", median_ratio(stored, plain), "ratio",
            bar="<= 1.03", of="value"),
    ]  # fmt: skip


def _cpu(processes: list[psutil.Process]) -> float:
    return sum(p.cpu_times().user + p.cpu_times().system for p in processes)
