"""One layer of decode attention: the path that would be chosen against the fastest of all paths."""

from __future__ import annotations

from benches.child import Child
from benches.rows import Row, row
from rig.daemon import short_home

SHAPES = ((9, 3, 64), (32, 8, 128))
"""query heads, KV heads, head size: the demo model's and Llama-3-8B's"""
CASES = (
    (1, 256, False), (1, 2048, False), (1, 8192, False), (2, 100, False), (8, 300, False), (16, 300, False),
    (8, 2048, False), (2, 2048, True), (8, 512, True), (8, 4096, True),
)  # fmt: skip
"""sequences, rows of each, whether all but a tail is shared"""


def run() -> list[Row]:
    rows = []
    with short_home() as home, Child("attention", home=home) as child:
        for heads, kv_heads, dim in SHAPES:
            for count, length, shared in CASES:
                found = child.ask(
                    heads=heads, kv_heads=kv_heads, dim=dim, rows=count, length=length, shared=shared, dtype="float32"
                )
                chosen = found.pop("chosen")
                best = min(found, key=lambda name: found[name])
                kind = "shared" if shared else "own"
                name = f"{heads} heads, {count} x {length} {kind} rows; fastest: {best}"
                rows.append(row(name, chosen, "ms", baseline=found[best], stats=[found]))
    return rows
