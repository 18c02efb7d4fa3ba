"""A model of Llama-3-8B's shape (4-bit, random weights) on an NVIDIA GPU: reuse, decode and sharing at 32K tokens.

KVD_BENCH_PARTS names some of: stock, reuse, share, storing, dialogue, restart, quantised. KVD_BENCH_HOME keeps the
model between runs.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benches.child import Child
from benches.rows import Row, row, show
from benches.store import forget
from kvclient import Client
from kvd.models.backend import expected
from rig.daemon import Daemon, short_home

LENGTH, CHUNK = 32768, 2048
TOGETHER = 200
NAME = "shape8b"
FLAGS = ("--cache-chunk", str(CHUNK), "--store-limit", "40GB", "--memory-limit", "100GB")


def run() -> list[Row]:
    if expected() != "cuda":
        raise SystemExit("tools/bench gpu needs an NVIDIA GPU and the cuda13 or cuda12 extra; none was found")
    root = Path(os.environ.get("KVD_BENCH_HOME", Path(__file__).resolve().parents[2] / ".venv" / "bench-home"))
    models = root / "models"
    if not (models / NAME / "tokenizer_config.json").exists():
        tools = Path(__file__).parents[1]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tools), str(tools.parent), *sys.path))}
        subprocess.run([sys.executable, "-m", "benches.children.shape8b", str(models / NAME)], check=True, env=env)
    kernels = root / "kernels"
    kernels.mkdir(exist_ok=True)
    os.environ.setdefault("MLX_PTX_CACHE_DIR", str(kernels))  # homes are fresh here, compiled kernels need not be
    chosen = os.environ.get("KVD_BENCH_PARTS", "stock,reuse,share,storing,dialogue,restart,quantised").split(",")
    rows = timed("stock", lambda: stock(models)) if "stock" in chosen else []
    known = {row.name: row.value for row in rows}
    with short_home(models) as home, Daemon(home, *FLAGS) as daemon:
        rows += timed("load", lambda: load(daemon))
        parts: dict[str, Callable[[], list[Row]]] = {
            "reuse": lambda: reuse(daemon, known), "share": lambda: share(daemon, known),
            "storing": lambda: storing(daemon), "dialogue": lambda: dialogue(daemon),
            "restart": lambda: restart(daemon), "quantised": lambda: quantised(daemon),
        }  # fmt: skip
        for name, part in parts.items():
            if name in chosen:
                rows += timed(name, part)
    return rows


def timed(name: str, part: Callable[[], list[Row]]) -> list[Row]:
    begin = time.perf_counter()
    found = part()
    say(f"{name}: {time.perf_counter() - begin:.0f} s")
    show(found, name)
    return found


def say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(count)]


def ask(client: Client, ids: list[int], most: int = 8, **options: Any) -> tuple[float, dict[str, Any], str]:
    """Seconds to the first token as the daemon counts them (what random weights say is no text for long), stats and
    text."""
    options = {"durable_wait_ms": 30_000, "temperature": 0.0, **options}
    done = client.generate(NAME, tokens=ids, max_tokens=most, **options)
    say(f"{len(ids)} tokens: first after {done.stats.ttft_s:.3f} s, {done.stats.computed_tokens} computed")
    return done.stats.ttft_s, asdict(done.stats), done.text


def load(daemon: Daemon) -> list[Row]:
    """The first one compiles kernels where none are kept."""
    begin = time.perf_counter()
    with daemon.client() as client:
        client.load(NAME)
    return [row("load", time.perf_counter() - begin, "s")]


Known = Mapping[str, float]
"""Values measured so far, by the names of their rows."""


def stock(models: Path) -> list[Row]:
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
            each = child.ask(what="batch", position=LENGTH, sequences=8, steps=20)["seconds"]
            rows.append(row(f"mlx-lm, cuDNN {cudnn}: 8 with 32K each, together", 8 / each, "tok/s"))
    os.environ.pop("MLX_CUDA_USE_CUDNN_SDPA")
    return rows


def reuse(daemon: Daemon, known: Known) -> list[Row]:
    """Against mlx-lm as it comes, where `stock` was measured before."""
    ids = tokens(LENGTH, 1)
    with daemon.client() as client:
        ask(client, tokens(3000, 2))
        cold, cold_stats, text = ask(client, ids)
        again = [ask(client, ids) for _ in range(5)]
        tail = ask(client, ids[: LENGTH - LENGTH // 10] + tokens(LENGTH // 10, 3))
        speeds = {p: [ask(client, ids[:p], 120)[1] for _ in range(3)] for p in (128, 8192, LENGTH)}
    rows = [
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
    return rows


def restart(daemon: Daemon) -> list[Row]:
    ids = tokens(LENGTH, 6)
    rows: list[Row] = []
    with daemon.client() as client:
        cold, _, text = ask(client, ids)
    for name in ("page cache warm", "page cache cold"):
        daemon.stop()
        if name.endswith("cold"):
            os.sync()  # pages that are still to be written cannot be put out
            forget([str(path) for path in (daemon.home / "store").rglob("*") if path.is_file()])
        daemon.start()
        rows += timed(f"load again, {name}", lambda: load(daemon))
        with daemon.client() as client:
            seconds, stats, said = ask(client, ids)
        rows.append(row(f"restarted, {name}", seconds, "s", baseline=cold, stats=[stats]))
        rows.append(row(f"restarted, {name}: same text", float(said == text), "bool", bar="== 1", of="value"))
    return rows


def share(daemon: Daemon, known: Known) -> list[Row]:
    """Two, four and eight sequences that share 32K tokens: memory, tokens per second together and one alone."""
    ids = tokens(LENGTH, 5)

    def held() -> float:
        time.sleep(2.5)  # numbers come with a beat, once a second
        pool = next(m for m in daemon.status()["models"] if m["name"] == NAME)
        blocks = int(pool["blocks_total"]) - int(pool["blocks_free"])
        return float(blocks * int(pool["block_size"]) * int(pool["kv_bytes_per_token"]))

    def several(count: int) -> tuple[float, list[dict[str, Any]]]:
        """Tokens per second from the first start to the last end, and everyone's stats."""
        done: list[dict[str, Any]] = []

        def one(index: int) -> None:
            with daemon.client() as mine:
                done.append(ask(mine, [*ids, 100 * count + index], TOGETHER, durable_wait_ms=0)[1])

        threads = [threading.Thread(target=one, args=(index,)) for index in range(count)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(s["completion_tokens"] for s in done) / (time.perf_counter() - begin), done

    with daemon.client() as client:
        before = held()
        ask(client, ids)
        once = held() - before
        alone = statistics.median(ask(client, [*ids, 7 + n], TOGETHER)[1]["decode_tokens_per_s"] for n in range(3))
        rows = []
        for count in (2, 4):
            speed, done = several(count)
            rows.append(row(f"{count} sharing 32K: tokens/s start to end, against one", speed, "tok/s", baseline=alone))
        before = held() - once
        speed, done = several(8)
        extra = held() - before
    stock = known.get("mlx-lm, cuDNN 1: 8 with 32K each, together")
    return [
        *rows,
        row("8 sharing 32K: tokens/s start to end, against one", speed, "tok/s", baseline=alone),
        row("8 sharing 32K: tokens/s of decode, against mlx-lm's batch of 8 with 32K each",
            sum(s["decode_tokens_per_s"] for s in done), "tok/s", baseline=stock, stats=done),
        row("8 sharing 32K: KV of all against that of the prefix", extra, "B", baseline=once, bar="<= 1.1"),
    ]  # fmt: skip


def storing(daemon: Daemon) -> list[Row]:
    """Seconds to the first token of 8K new tokens, with their blocks on the way to the disk and without: in turns, the
    time after it for the disk to end not counted."""
    with daemon.client() as client:
        ask(client, tokens(8192, 50), cache="off")
        pairs = [
            [ask(client, tokens(8192, 60 + 2 * turn + how), cache=("off", "use")[how])[0] for how in (0, 1)]
            for turn in range(9)
        ]
    without, stored = (statistics.median(pair[how] for pair in pairs) for how in (0, 1))
    return [row("storing: first token of 8K new tokens", stored, "s", baseline=without, bar="<= 1.01")]


def dialogue(daemon: Daemon) -> list[Row]:
    """A 30K document and twenty turns in a window of 48K: steady speed, nothing computed twice."""
    history = tokens(30_000, 7)
    firsts, speeds, extra = [], [], 0
    with daemon.client() as client:
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


def quantised(daemon: Daemon) -> list[Row]:
    """Prefill and decode at 8K with quantised KV, against native KV."""
    ids, found = tokens(8192, 90), {}
    with daemon.client() as client:
        for kv in ("native", "k8v4"):
            client.unload(NAME)
            client.load(NAME, kv=kv)
            ask(client, tokens(8192, 91), 4)
            first, _, _ = ask(client, ids)
            speeds = [ask(client, ids, 120)[1]["decode_tokens_per_s"] for _ in range(3)]
            found[kv] = first, statistics.median(speeds)
    (native, fast), (first, speed) = found["native"], found["k8v4"]
    return [
        row("k8v4: first token of 8K", first, "s", baseline=native),
        row("k8v4: decode at 8K", speed, "tok/s", baseline=fast),
    ]
