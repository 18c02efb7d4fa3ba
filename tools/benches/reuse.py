"""What reuse is worth: time to first token of one prompt, cold and in every state of the caches."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benches.child import Child
from benches.rows import Row, median_ratio, paired, row
from kvclient import Client
from rig.daemon import Daemon, demo_models, short_home

LENGTHS = {2048: ("<= 0.016667", "<= 0.025"), 4096: ("<= 0.005", "<= 0.0125")}
"""tokens: (bar of a repeat, bar after a restart), as fractions of cold"""
ROUNDS = 5
CHUNK = 512
BLOCK = 256
RESTORED = 4096
"""tokens of a prefix on disk"""
SLOW = 0.25e9
"""bytes per second of a disk that is slower than this one, made so by waiting"""
PAIRS = 15


def real_text_ids(models: Path, length: int) -> list[int]:
    """`length` token ids of the project's own sources: real text, always at hand."""
    root = Path(__file__).resolve().parents[2]
    text = "\n".join(
        path.read_text() for path in sorted(root.glob("kvd/**/*.py")) + sorted(root.glob("kvclient/**/*.py"))
    )
    ids: list[int] = Tokenizer.from_file(str(models / "demo" / "tokenizer.json")).encode(text).ids
    if len(ids) < length:
        raise RuntimeError(f"only {len(ids)} tokens of text for a prompt of {length}")
    return ids[:length]


def ask(client: Client, ids: list[int]) -> tuple[float, dict[str, Any]]:
    """Seconds to the first text as a client sees it, and the request's stats."""
    begin = time.perf_counter()
    first = None
    stats: dict[str, Any] = {}
    for event in client.stream(
        "demo", tokens=ids, max_tokens=8, temperature=0.0, durable_wait_ms=20_000, logit_bias={0: -100.0, 2: -100.0}
    ):
        if first is None and event.kind in ("text", "reasoning", "done"):
            first = time.perf_counter() - begin
        if event.done is not None:
            stats = asdict(event.done.stats)
    assert first is not None
    return first, stats


def at_length(length: int, models: Path, repeat_bar: str, restart_bar: str) -> list[Row]:
    rng = random.Random(length)
    ids = real_text_ids(models, length)
    with short_home(models) as home, Daemon(home) as daemon, Child("stock", str(models / "demo"), home=home) as stock:
        with daemon.client() as client:
            client.load("demo")
            ask(client, ids[:64])  # warm the process, not the prompt: a different first token follows
            ids = [ids[0] + 1, *ids[1:]]
            cold, cold_stats = ask(client, ids)
            stock_cold = stock.ask(what="prefill", offset=0, rows=length, chunk=CHUNK)["seconds"]
            repeats = [ask(client, ids) for _ in range(ROUNDS)]
            kept = length - length // 10
            changed, stock_seconds = [], []
            for _ in range(3):
                tail = [rng.randrange(10, 40_000) for _ in range(length - kept)]
                changed.append(ask(client, ids[:kept] + tail))
                stock_seconds.append(stock.ask(what="prefill", offset=kept, rows=length - kept, chunk=CHUNK)["seconds"])
        restarts = []
        for _ in range(3):
            daemon.restart()
            with daemon.client() as client:
                client.load("demo")
                restarts.append(ask(client, ids))
    repeat = statistics.median(s for s, _ in repeats)
    restart = statistics.median(s for s, _ in restarts)
    tail_s = statistics.median(s for s, _ in changed)
    return [
        row(f"{length}: cold, against mlx-lm", cold, "s", baseline=stock_cold, stats=[cold_stats]),
        row(f"{length}: repeated, against mlx-lm's cold", repeat, "s", baseline=stock_cold),
        row(f"{length}: restarted, against mlx-lm's cold", restart, "s", baseline=stock_cold),
        row(f"{length}: repeated", repeat, "s", baseline=cold, bar=repeat_bar, stats=[s for _, s in repeats]),
        row(f"{length}: repeated, computed", computed(repeats), "tokens", bar="== 1", of="value"),
        row(f"{length}: restarted", restart, "s", baseline=cold, bar=restart_bar, stats=[s for _, s in restarts]),
        row(f"{length}: restarted, computed", computed(restarts), "tokens", bar="== 1", of="value"),
        row(f"{length}: last 10 % changed, against mlx-lm", tail_s, "s", baseline=statistics.median(stock_seconds),
            bar="<= 1.10", stats=[s for _, s in changed]),
        row(f"{length}: last 10 % changed, computed", computed(changed), "tokens", bar=f"== {length - kept}",
            of="value"),
        row(f"{length}: last 10 % changed, against cold", tail_s, "s", baseline=cold),
    ]  # fmt: skip


def computed(asked: list[tuple[float, dict[str, Any]]]) -> int:
    """Most tokens that one of these requests had computed."""
    return max(int(stats["computed_tokens"]) for _, stats in asked)


def restored(models: Path) -> list[Row]:
    """A prefix on disk with another tail behind it, or none: compute that starts behind the first layers, against
    whole blocks first. Pairs of the engine's own code in one process."""
    found = []
    with short_home(models) as home, Child(
        "restore", str(models / "demo"), str(home), str(RESTORED // BLOCK), home=home
    ) as child:  # fmt: skip
        for disk, rate in (("disk", 0.0), (f"{SLOW / 1e9} GB/s", SLOW)):
            for tail in (0, 64):
                layered = partial(first_token, child, tail=tail, layered=True, rate=rate)
                layered()
                ours, whole = paired(layered, partial(first_token, child, tail=tail, layered=False, rate=rate), PAIRS)
                took, ratio = statistics.median(ours), median_ratio(ours, whole)
                name = f"{RESTORED} from {disk}, {tail or 'no'} others behind, layer by layer against whole blocks"
                found.append(row(name, took, "s", baseline=took / ratio))
    return found


def first_token(child: Child, **asked: Any) -> float:
    """Seconds."""
    return float(child.ask(**asked)["seconds"])


def run() -> list[Row]:
    models = demo_models()
    return [*restored(models), *(r for length, bars in LENGTHS.items() for r in at_length(length, models, *bars))]
