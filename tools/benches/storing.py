"""What storing costs a first request: CPU seconds of front and worker for a prefill with the store on and off."""

from __future__ import annotations

import statistics

from benches.cpu import cpu_seconds, processes
from benches.reuse import real_text_ids
from benches.rows import Row, median_ratio, paired, row
from rig.daemon import Daemon, demo_models, short_home

ROUNDS, LENGTH = 9, 1025
POOL = ("--cache-pool-initial", "2GiB")
"""What is stored stays in memory too, and a pool that grows costs as much as storing does: here it need not."""


def run() -> list[Row]:
    models = demo_models()
    ids = real_text_ids(models, LENGTH)
    with short_home(models) as home, Daemon(home, *POOL) as daemon, daemon.client() as client:
        client.load("demo")
        these = processes(daemon)
        numbers = iter(range(1000, 2000))

        def prefill(mode: str) -> float:
            prompt = [next(numbers), *ids[1:]]  # nothing in common with any before
            before = cpu_seconds(these)
            client.generate("demo", tokens=prompt, max_tokens=1, temperature=0.0, cache=mode, durable_wait_ms=20_000)
            return cpu_seconds(these) - before

        prefill("use"), prefill("read")
        stored, plain = paired(lambda: prefill("use"), lambda: prefill("read"), ROUNDS)
    return [
        row(f"prefill of {LENGTH} with the store on: CPU seconds", statistics.median(stored), "s",
            baseline=statistics.median(plain)),
        row(f"prefill of {LENGTH}: median ratio of {ROUNDS} pairs", median_ratio(stored, plain), "ratio",
            bar="<= 1.03", of="value"),
    ]  # fmt: skip
