"""A model of Llama-3-8B's shape (4-bit, random weights) on an NVIDIA GPU: reuse, decode and sharing at 32K tokens.

KVD_BENCH_PARTS names some of: stock, reuse, share, dialogue. KVD_BENCH_HOME keeps the model between runs.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benches.child import Child
from benches.rows import Row, row, show
from kvclient import Client
from kvd.models.backend import expected
from rig.daemon import Daemon, short_home

LENGTH, CHUNK = 32768, 2048
NAME = "shape8b"
FLAGS = ("--cache-chunk", str(CHUNK), "--store-limit", "40GB", "--memory-limit", "100GB")


def run() -> list[Row]:
    if expected() != "cuda":
        raise SystemExit("tools/bench gpu needs an NVIDIA GPU and the cuda13 or cuda12 extra; none was found")
    root = Path(os.environ.get("KVD_BENCH_HOME", Path(__file__).resolve().parents[2] / ".venv" / "bench-home"))
    folder = root / "models" / NAME
    if not (folder / "tokenizer_config.json").exists():
        tools = Path(__file__).parents[1]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tools), str(tools.parent), *sys.path))}
        subprocess.run([sys.executable, "-m", "benches.children.shape8b", str(folder)], check=True, env=env)
    kernels = root / "kernels"
    kernels.mkdir(exist_ok=True)
    os.environ.setdefault("MLX_PTX_CACHE_DIR", str(kernels))  # homes are fresh here, compiled kernels need not be
    chosen = os.environ.get("KVD_BENCH_PARTS", "stock,reuse,share,dialogue").split(",")
    parts = {"stock": stock, "reuse": reuse, "share": share, "dialogue": dialogue}
    rows: list[Row] = []
    for name in chosen:
        begin = time.perf_counter()
        found = parts[name](root / "models", {row.name: row.value for row in rows})
        rows.extend(found)
        say(f"{name}: {time.perf_counter() - begin:.0f} s")
        show(found, name)
    return rows


def say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(count)]


def ask(client: Client, ids: list[int], most: int = 8, **options: Any) -> tuple[float, dict[str, Any], str]:
    """Seconds to the first text, stats and text. The answer never ends early: its end tokens are out of reach."""
    begin, first = time.perf_counter(), None
    options = {"logit_bias": {0: -100.0, 2: -100.0}, "durable_wait_ms": 30_000, "temperature": 0.0, **options}
    for event in client.stream(NAME, tokens=ids, max_tokens=most, **options):
        if first is None and event.kind in ("text", "done"):
            first = time.perf_counter() - begin
        if event.kind == "done":
            assert first is not None and event.done is not None
            say(f"{len(ids)} tokens: first after {first:.3f} s, {event.done.stats.computed_tokens} computed")
            return first, asdict(event.done.stats), event.done.text
    raise RuntimeError("the stream ended without done")


Known = Mapping[str, float]
"""Values measured so far, by the names of their rows."""


def stock(models: Path, known: Known) -> list[Row]:
    """mlx-lm by itself, with cuDNN's attention (its default) and without."""
    rows: list[Row] = []
    for cudnn in ("1", "0"):
        os.environ["MLX_CUDA_USE_CUDNN_SDPA"] = cudnn
        with Child("stock", str(models / NAME), home=models.parent) as child:
            child.ask(what="prefill", offset=0, rows=4096, chunk=CHUNK)
            for length in (8192, LENGTH):
                seconds = child.ask(what="prefill", offset=0, rows=length, chunk=CHUNK)["seconds"]
                rows.append(row(f"mlx-lm, cuDNN {cudnn}: prefill of {length}", seconds, "s"))
            for position in (128, 8192, LENGTH):
                each = [child.ask(what="decode", position=position, steps=40)["seconds"] for _ in range(3)]
                rows.append(row(f"mlx-lm, cuDNN {cudnn}: decode at {position}", 1 / statistics.median(each), "tok/s"))
    os.environ.pop("MLX_CUDA_USE_CUDNN_SDPA")
    return rows


def reuse(models: Path, known: Known) -> list[Row]:
    """Against mlx-lm as it comes, where `stock` was measured before."""
    ids = tokens(LENGTH, 1)
    rows: list[Row] = []
    with short_home(models) as home, Daemon(home, *FLAGS) as daemon:
        with daemon.client() as client:
            client.load(NAME)
            ask(client, tokens(3000, 2))
            cold, cold_stats, text = ask(client, ids)
            again = [ask(client, ids) for _ in range(3)]
            tail = ask(client, ids[: LENGTH - LENGTH // 10] + tokens(LENGTH // 10, 3))
            speeds = {p: [ask(client, ids[:p], 120)[1] for _ in range(3)] for p in (128, 8192, LENGTH)}
        rows += [
            row("cold 32K", cold, "s", baseline=known.get(f"mlx-lm, cuDNN 1: prefill of {LENGTH}"), stats=[cold_stats]),
            row("repeated", statistics.median(a[0] for a in again), "s", baseline=cold, stats=[a[1] for a in again]),
            row("repeated: same text", float(all(t == text for _, _, t in again)), "bool", bar="== 1", of="value"),
            row("last 10 % changed", tail[0], "s", baseline=cold, stats=[tail[1]]),
        ]
        for position, found in speeds.items():
            speed = statistics.median(stats["decode_tokens_per_s"] for stats in found)
            base = known.get(f"mlx-lm, cuDNN 1: decode at {position}")
            bar = ">= 0.97" if base else ""
            rows.append(row(f"decode at {position}", speed, "tok/s", baseline=base, bar=bar, stats=found))
        for name in ("page cache warm", "page cache cold"):
            daemon.stop()
            if name.endswith("cold"):
                forget(home / "store")
            daemon.start()
            with daemon.client() as client:
                client.load(NAME)
                seconds, stats, said = ask(client, ids)
            rows.append(row(f"restarted, {name}", seconds, "s", baseline=cold, stats=[stats]))
            rows.append(row(f"restarted, {name}: same text", float(said == text), "bool", bar="== 1", of="value"))
    return rows


def share(models: Path, known: Known) -> list[Row]:
    """Eight sequences that share 32K tokens: memory, tokens per second together and one alone."""
    ids = tokens(LENGTH, 5)
    done: list[dict[str, Any]] = []
    with short_home(models) as home, Daemon(home, *FLAGS) as daemon, daemon.client() as client:
        ask(client, ids)
        alone = ask(client, [*ids, 7], 100)[1]

        def one(index: int) -> None:
            with daemon.client() as mine:
                done.append(ask(mine, [*ids, 10 + index], 100)[1])

        threads = [threading.Thread(target=one, args=(index,)) for index in range(8)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - begin
        pool = next(m for m in daemon.status()["models"] if m["name"] == NAME)
    together = sum(s["completion_tokens"] for s in done) / seconds
    held = (pool["blocks_total"] - pool["blocks_free"]) * pool["block_size"] * pool["kv_bytes_per_token"]
    once = (LENGTH + 9 * 256) * pool["kv_bytes_per_token"]
    return [
        row("8 sharing 32K: tokens/s together", together, "tok/s", baseline=alone["decode_tokens_per_s"], stats=done),
        row("8 sharing 32K: pool in use against prefix once and tails", held, "B", baseline=once, bar="<= 1.1"),
    ]


def dialogue(models: Path, known: Known) -> list[Row]:
    """A 30K document and twenty turns in a window of 48K: steady speed, nothing computed twice."""
    history = tokens(30_000, 6)
    firsts, speeds, extra = [], [], 0
    with short_home(models) as home, Daemon(home, *FLAGS) as daemon, daemon.client() as client:
        for turn in range(20):
            question = tokens(200, 100 + turn)
            seconds, stats, _ = ask(client, history + question, 64)
            if turn:
                firsts.append(seconds)
                speeds.append(stats["decode_tokens_per_s"])
                extra = max(extra, stats["computed_tokens"] - len(question))
            history += question
    return [
        row("dialogue: time to first token, last five turns against first five",
            statistics.median(firsts[-5:]), "s", baseline=statistics.median(firsts[:5])),
        row("dialogue: tokens/s, last five turns against first five",
            statistics.median(speeds[-5:]), "tok/s", baseline=statistics.median(speeds[:5])),
        row("dialogue: most tokens computed beyond the new ones", extra, "tokens", bar="<= 1", of="value"),
    ]  # fmt: skip


def forget(folder: Path) -> None:
    """Drop the files' pages from the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
