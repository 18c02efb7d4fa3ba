"""`tools/torture [--quick] [--json FILE] [NAME…]`: fault campaigns of the store and the daemon, with counts."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from torments import bits, daemon, damage, disk, kills, lost, nth
from torments.oracle import Outcome

CAMPAIGNS: dict[str, tuple[Callable[[bool], Outcome], str]] = {
    "kills": (kills.run, "SIGKILL at random moments and at every named point"),
    "nth": (nth.run, "the Nth call of every kind fails, once and for good"),
    "lost": (lost.run, "power cuts that drop, halve and reorder what was not synced"),
    "bits": (bits.run, "damaged shards"),
    "damage": (damage.run, "a damaged, lost or outdated index"),
    "disk": (disk.run, "too full, slow, vanished disks; traffic of ten times the limit"),
    "daemon": (daemon.run, "fronts and workers killed in the middle of requests"),
}
COLUMNS = ("runs", "samples", "acknowledged", "wrong_bytes", "lost", "hangs", "over_limit", "leaks")


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/torture", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all ({', '.join(CAMPAIGNS)})")
    parser.add_argument("--quick", action="store_true", help="the short form, under a minute, as the tests run it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts there too")
    options = parser.parse_args()
    if unknown := set(options.names) - set(CAMPAIGNS):
        parser.error(f"unknown campaign: {', '.join(sorted(unknown))} (known: {', '.join(CAMPAIGNS)})")
    rows = []
    for name in options.names or CAMPAIGNS:
        run, what = CAMPAIGNS[name]
        print(f"{name}: {what} …", file=sys.stderr, flush=True)
        began = time.monotonic()
        outcome = run(options.quick)
        rows.append({**outcome.plain(), "campaign": name, "seconds": round(time.monotonic() - began, 1)})
        for failure in outcome.failures[:20]:
            print(f"  {failure}", file=sys.stderr)
    show(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["ok"] for row in rows) else 1


def show(rows: list[dict[str, Any]]) -> None:
    table = Table()
    for column in ("campaign", *COLUMNS, "seconds", ""):
        table.add_column(column.replace("_", " "), justify="left" if column in ("campaign", "") else "right")
    for row in rows:
        verdict = "[green]ok[/]" if row["ok"] else f"[red]{len(row['failures'])} FAILED[/]"
        table.add_row(row["campaign"], *(f"{row[c]:,}" for c in COLUMNS), f"{row['seconds']:.1f}", verdict)
    Console(width=130).print(table)
    print(verdict_of(rows))


def verdict_of(rows: list[dict[str, Any]]) -> str:
    """The line that counts."""
    wrong, lost_, hangs, over = (sum(row[c] for row in rows) for c in ("wrong_bytes", "lost", "hangs", "over_limit"))
    held = "limit held at every sample" if not over else f"limit broken at {over} samples"
    return (
        f"{sum(row['runs'] for row in rows):,} runs, {sum(row['samples'] for row in rows):,} samples of du: "
        f"{wrong} wrong bytes, {lost_} acknowledged blocks lost, {hangs} hangs, {held}"
    )


if __name__ == "__main__":
    sys.exit(main())
