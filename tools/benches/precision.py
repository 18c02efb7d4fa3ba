"""KV precisions of the demo model: bytes and peak memory by preset, decode steps against mlx-lm's caches at equal bits."""

from __future__ import annotations

from benches.child import Child
from benches.rows import Row, row
from kvd.cache.precision import PRESETS
from rig.daemon import demo_models, short_home

TOKENS = 4096
POSITIONS = (2048, 7500)
PAIRS = 40
STEPS = (("native", 0), ("k8v8", 8), ("k4v4", 4))
"""ours, and the bits of mlx-lm's cache (0: KVCache)"""
MIXED = ("k8v4", (8, 4))


def run() -> list[Row]:
    models = demo_models()
    with short_home() as home, Child("precision", str(models / "demo"), home=home) as child:
        return [*_memory(child), *_decode(child)]


def _memory(child: Child) -> list[Row]:
    rows, native = [], None
    for kv in PRESETS:
        found = child.ask(what="memory", kv=kv, tokens=TOKENS)
        native = native or found["peak"]
        off = max(abs(found[kind] / found["formula"] - 1) for kind in ("measured", "live"))
        rows.append(row(f"{kv}: bytes per token in the pool", found["measured"], "B", baseline=found["formula"]))
        rows.append(row(f"{kv}: that, and what is live, off the formula", off, "share", bar="<= 0.01", of="value"))
        rows.append(row(f"{kv}: peak in the last chunk of a {TOKENS}-token prefill", found["peak"], "B", baseline=native))
    return rows


def _decode(child: Child) -> list[Row]:
    rows = []
    for position in POSITIONS:
        for kv, bits in STEPS:
            found = child.ask(what="decode", kv=kv, stock=bits, position=position, pairs=PAIRS)
            other = f"mlx-lm at {bits} bits" if bits else "KVCache"
            rows.append(row(f"{kv} against {other}, step at {position}", found["ours"], "s", baseline=found["stock"]))
            bar = "<= 1.05" if bits else "<= 1.03"
            rows.append(row(f"… median ratio of {PAIRS} pairs", found["ratio"], "ratio", bar=bar, of="value"))
        kv, both = MIXED
        runs = [child.ask(what="decode", kv=kv, stock=bits, position=position, pairs=PAIRS) for bits in both]
        slower = max(runs, key=lambda one: one["stock"])
        name = f"{kv} against the slower of mlx-lm at {both[0]} and {both[1]} bits, step at {position}"
        rows.append(row(name, slower["ours"], "s", baseline=slower["stock"]))
        rows.append(row(f"… median ratio of {PAIRS} pairs", slower["ratio"], "ratio", bar="<= 1.05", of="value"))
    return rows
