"""Many requests at once: tokens per second of mixed and of sharing batches, and how soon sharers start.

Decode steps are compared in one process, in turn, sockets left out. The start is that of the real daemon.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from benches.child import Child
from benches.reuse import ask, real_text_ids
from benches.rows import Row, row
from kvclient import Client
from rig.daemon import Daemon, demo_models, short_home

MIXED = (1, 2, 4, 8, 16)
PREFIX, SHARERS = 4096, 8
ROUNDS = 5
SINGLE_ROUNDS = 30
"""of one sequence: its steps are short and its bar is near"""


def run() -> list[Row]:
    models = demo_models()
    with short_home() as home, Child("packed", str(models / "demo"), home=home) as child:
        rows = [one for count in MIXED for one in mixed(child, count)] + sharing(child)
    return rows + starts(models)


def mixed(child: Child, count: int) -> list[Row]:
    """Lengths from 100 to 1,500 rows, evenly spread."""
    lengths = [100 + 1400 * index // max(count - 1, 1) for index in range(count)] if count > 1 else [800]
    found = child.ask(lengths=lengths, shared=False, rounds=max(ROUNDS, SINGLE_ROUNDS // count))
    bar = ">= 0.97" if count == 1 else ">= 1.0"
    return [
        row(f"{count} mixed: tokens per second, the better of the others", count / found["ours"], "tok/s",
            baseline=count / min(found["others"])),
        row(f"{count} mixed: median ratio to the better of one at a time and BatchGenerator", found["ratio"], "x",
            bar=bar, of="value"),
    ]  # fmt: skip


def sharing(child: Child) -> list[Row]:
    found = child.ask(lengths=[PREFIX] * SHARERS, shared=True, rounds=ROUNDS)
    once = PREFIX // 256 + SHARERS
    name = f"{SHARERS} sharing {PREFIX}"
    return [
        row(f"{name}: median ratio to BatchGenerator", found["ratio"], "x", bar=">= 1.5", of="value"),
        row(f"{name}: blocks in use against prefix once and tails", found["blocks"], "", baseline=once, bar="<= 1.1"),
    ]


def starts(models: Path) -> list[Row]:
    """Eight clients ask at the same moment behind one prefix that nobody has computed yet."""
    prefix = real_text_ids(models, PREFIX)
    firsts: list[float] = []
    with short_home(models) as home, Daemon(home) as daemon:
        with daemon.client() as client:
            client.load("demo")
            ask(client, prefix[:64][::-1])
        begin = time.perf_counter()

        def one(index: int) -> None:
            with daemon.client() as client:
                _first(client, [*prefix, 1000 + index], begin, firsts)

        threads = [threading.Thread(target=one, args=(index,)) for index in range(SHARERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    firsts.sort()
    return [row(f"{SHARERS} sharing {PREFIX}: last start after the first, against the first's prefill",
                firsts[-1] - firsts[0], "s", baseline=firsts[0], bar="<= 0.1")]  # fmt: skip


def _first(client: Client, ids: list[int], begin: float, firsts: list[float]) -> None:
    for event in client.stream("demo", tokens=ids, max_tokens=4, temperature=0.0, logit_bias={0: -100.0, 2: -100.0}):
        if event.kind == "text":
            firsts.append(time.perf_counter() - begin)
            break
