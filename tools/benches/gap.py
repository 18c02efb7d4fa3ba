"""What a decoding stream feels while a long prompt prefills beside it: its gaps between tokens."""

from __future__ import annotations

import statistics
import threading
import time

from benches.reuse import real_text_ids
from benches.rows import Row, row
from rig.daemon import Daemon, demo_models, short_home

PROMPT = 4096


def run() -> list[Row]:
    models = demo_models()
    ids = real_text_ids(models, PROMPT)
    quiet: list[float] = []
    busy: list[float] = []
    with short_home(models) as home, Daemon(home) as daemon, daemon.client() as client:
        client.load("demo")
        started, ended = threading.Event(), threading.Event()

        def prefill() -> None:
            with daemon.client() as other:
                started.set()
                other.generate("demo", tokens=ids, max_tokens=1, temperature=0.0, durable_wait_ms=0)
            ended.set()

        thread = threading.Thread(target=prefill)
        last = None
        for event in client.stream(
            "demo", tokens=ids[100:110], max_tokens=3000, temperature=0.0, logit_bias={0: -100.0, 2: -100.0}
        ):
            now = time.perf_counter()
            if event.kind != "text":
                continue
            if last is not None:
                (busy if started.is_set() else quiet).append(now - last)
            last = now
            if len(quiet) == 20 and not started.is_set():
                thread.start()
                started.wait()
            if ended.is_set():
                break
        thread.join()
    busy.sort()
    return [
        row(f"gap between tokens while {PROMPT} tokens prefill: p50", statistics.median(busy), "s",
            baseline=statistics.median(quiet)),
        row(f"gap between tokens while {PROMPT} tokens prefill: p99", busy[int(0.99 * (len(busy) - 1))], "s",
            baseline=statistics.median(quiet), bar="<= 0.6", of="value"),
    ]  # fmt: skip
