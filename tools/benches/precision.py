"""KV precisions of the demo model: bytes and peak memory by preset, decode steps against mlx-lm's at equal bits.

Steps are in seconds of the process's CPU on the CPU backend, in seconds of time elsewhere.
"""

from __future__ import annotations

from benches.child import Child
from benches.rows import Row, row
from kvd.cache.precision import PRESETS
from rig.daemon import demo_models, short_home

TOKENS = 4096
POSITIONS = (2048, 7500)
ROUNDS = 40
STEPS = (("native", (0,), "KVCache", "<= 1.03"), ("k8v8", (8,), "mlx-lm at 8 bits", "<= 1.05"),
         ("k4v4", (4,), "mlx-lm at 4 bits", "<= 1.05"),
         ("k8v4", (8, 4), "the slower of mlx-lm at 8 and 4 bits", "<= 1.05"))  # fmt: skip
"""ours, and the bits of mlx-lm's caches (0: KVCache)"""


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
        what = f"{kv}: peak in the last chunk of a {TOKENS}-token prefill"
        rows.append(row(what, found["peak"], "B", baseline=native))
    return rows


def _decode(child: Child) -> list[Row]:
    rows = []
    for position in POSITIONS:
        for kv, bits, other, bar in STEPS:
            found = child.ask(what="decode", kv=kv, stock=bits, position=position, rounds=ROUNDS)
            rows.append(row(f"{kv} against {other}, step at {position}", found["ours"], "s", baseline=found["stock"]))
            rows.append(row(f"… median ratio of {ROUNDS} rounds", found["ratio"], "ratio", bar=bar, of="value"))
    return rows
