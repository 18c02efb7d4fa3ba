"""Updates of the pool are in place: a step costs the same in a pool sixteen times as large, and takes no memory."""

from __future__ import annotations

from benches.child import Child
from benches.rows import Row, row
from rig.daemon import demo_models, short_home

SMALL, LARGE, STEPS = 8, 128, 60
"""blocks: 94 MB and 1.5 GB of the demo model's KV"""


def run() -> list[Row]:
    models = demo_models()
    with short_home() as home, Child("steps", str(models / "demo"), home=home) as child:
        small = child.ask(what="growth", blocks=SMALL, steps=STEPS)
        large = child.ask(what="growth", blocks=LARGE, steps=STEPS)
    return [
        row(
            f"decode step, pool of {LARGE} blocks against {SMALL}",
            large["seconds"],
            "s",
            baseline=small["seconds"],
            bar="<= 1.10",
        ),
        row(
            "peak bytes beyond the pool against the small pool's",
            large["extra_bytes"],
            "B",
            baseline=small["extra_bytes"],
            bar="<= 1.10",
        ),
    ]
