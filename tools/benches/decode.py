"""One sequence's decode step: the model over the paged pool against mlx-lm's own contiguous cache."""

from __future__ import annotations

from benches.child import Child
from benches.rows import Row, row
from rig.daemon import demo_models, short_home

POSITIONS = (256, 2048, 7500)
PAIRS = 200


def run() -> list[Row]:
    models = demo_models()
    rows = []
    with short_home() as home, Child("steps", str(models / "demo"), home=home) as child:
        for position in POSITIONS:
            found = child.ask(what="decode", position=position, pairs=PAIRS)
            rows.append(row(f"decode step at {position}: seconds", found["ours"], "s", baseline=found["stock"]))
            rows.append(
                row(
                    f"decode step at {position}: median ratio of {PAIRS} pairs",
                    found["ratio"],
                    "ratio",
                    bar="<= 1.03",
                    of="value",
                )
            )
    return rows
