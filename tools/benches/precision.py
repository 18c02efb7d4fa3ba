"""KV precisions of the demo model: bytes and peak memory by preset, decode steps against mlx-lm's caches at equal bits,
and hits against recomputation.

Steps are in seconds of the process's CPU on the CPU backend, in seconds of time elsewhere.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benches.child import Child
from benches.reuse import real_text_ids
from benches.rows import Row, row
from kvclient import Client
from kvd.cache.precision import PRESETS
from rig.daemon import Daemon, demo_models, short_home

PRIMER = "k8v8g32"
"""whose KV is stored before the first of the presets"""
TOKENS = 4096
PROMPT = 600
POSITIONS = (2048, 7500)
ROUNDS = 30
STEPS = (("native", (0,), "KVCache", "<= 1.03"), ("k8v8", (8,), "mlx-lm at 8 bits", "<= 1.05"),
         ("k4v4", (4,), "mlx-lm at 4 bits", "<= 1.05"),
         ("k8v4", (8, 4), "the slower of mlx-lm at 8 and 4 bits", "<= 1.05"))  # fmt: skip
"""ours, and the bits of mlx-lm's caches (0: KVCache)"""


def run() -> list[Row]:
    models = demo_models()
    with short_home(models) as home:
        with Child("precision", str(models / "demo"), home=home) as child:
            rows = [*_memory(child), *_decode(child)]
        return [*rows, *_hits(home, models)]


def _memory(child: Child) -> list[Row]:
    rows, native = [], None
    for kv in PRESETS:
        found = child.ask(what="memory", kv=kv, tokens=TOKENS)
        native = native or found["peak"]
        off = max(abs(found[kind] / found["formula"] - 1) for kind in ("measured", "live"))
        rows.append(row(f"{kv}: bytes per token in the pool", found["measured"], "B", baseline=found["formula"]))
        rows.append(row(f"{kv}: that, and what is live, off the formula", off, "share", bar="<= 0.01", of="value"))
        what = f"{kv}: peak in the last chunk of a {TOKENS}-token prefill"
        rows.append(row(what, found["peak"], "B", baseline=native))
    return rows


def _decode(child: Child) -> list[Row]:
    pairs = [[kv, list(bits)] for kv, bits, _, _ in STEPS]
    rows = []
    for position in POSITIONS:
        results = child.ask(what="decode", pairs=pairs, position=position, rounds=ROUNDS)["pairs"]
        for (kv, _, other, bar), found in zip(STEPS, results, strict=True):
            rows.append(row(f"{kv} against {other}, step at {position}", found["ours"], "s", baseline=found["stock"]))
            rows.append(row(f"… median ratio of {ROUNDS} rounds", found["ratio"], "ratio", bar=bar, of="value"))
    return rows


@dataclass(frozen=True, slots=True)
class Said:
    """An answer to the bit: its text and every log probability."""

    text: str
    logprobs: tuple[float, ...]
    stats: dict[str, Any]

    @property
    def bits(self) -> tuple[str, tuple[float, ...]]:
        return self.text, self.logprobs

    @property
    def computed(self) -> int:
        return int(self.stats["computed_tokens"])


def _hits(home: Path, models: Path) -> list[Row]:
    """One prompt at every precision in turn, so that each load switches: the first time none of it may hit. Then again,
    and once more after a restart."""
    ids = real_text_ids(models, PROMPT)
    with Daemon(home) as daemon:
        first, again = {}, {}
        with daemon.client() as client:
            _ask(client, PRIMER, ids)
            for kv in PRESETS:
                first[kv], again[kv] = _ask(client, kv, ids), _ask(client, kv, ids)
        daemon.restart()
        with daemon.client() as client:
            restarted = {kv: _ask(client, kv, ids) for kv in PRESETS}
    rows = []
    for kv in PRESETS:
        switched, hits = first[kv], (again[kv], restarted[kv])
        stats = [one.stats for one in (switched, *hits)]
        kept = restarted[kv].stats["cached_ssd_tokens"] == PROMPT - 1
        same = all(hit.bits == switched.bits for hit in hits) and kept
        name = f"{kv}: computed of {PROMPT}, stored at other precisions"
        rows.append(row(name, switched.computed, "tokens", baseline=PROMPT, bar="== 1", stats=stats))
        name = f"{kv}: computed again, and from SSD after a restart, at most"
        rows.append(row(name, max(hit.computed for hit in hits), "tokens", bar="== 1", of="value"))
        name = f"{kv}: text and logprobs of both are those of the computation"
        rows.append(row(name, float(same), "bool", bar="== 1", of="value"))
    return rows


def _ask(client: Client, kv: str, ids: list[int]) -> Said:
    client.load("demo", kv=kv)
    done = client.generate(
        "demo", tokens=ids, max_tokens=8, temperature=0.0, logprobs=True, durable_wait_ms=20_000,
        logit_bias={0: -100.0, 2: -100.0},
    )  # fmt: skip
    assert done.stats.kv_precision == kv
    return Said(done.text, tuple(one.logprob for one in done.logprobs), asdict(done.stats))
