"""A measured figure beside its baseline and its bar."""

from __future__ import annotations

import json
import operator
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

HOLDS: Final[dict[str, Callable[[float, float], bool]]] = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}


@dataclass(frozen=True, slots=True)
class Row:
    """`ratio` is value / baseline; `bar` is text such as "<= 1.03" about `of` ("ratio" or "value")."""

    name: str
    value: float
    unit: str
    baseline: float | None = None
    ratio: float | None = None
    bar: str = ""
    ok: bool | None = None
    stats: list[dict[str, Any]] = field(default_factory=list)


def row(
    name: str,
    value: float,
    unit: str,
    *,
    baseline: float | None = None,
    bar: str = "",
    of: str = "ratio",
    stats: list[dict[str, Any]] | None = None,
) -> Row:
    ratio = value / baseline if baseline else None
    ok = None
    if bar:
        sign, number = bar.split()
        judged = ratio if of == "ratio" else value
        if judged is None:
            raise ValueError(f"{name}: a bar on a ratio needs a baseline")
        ok = HOLDS[sign](judged, float(number))
    return Row(name, value, unit, baseline, ratio, f"{of} {bar}" if bar else "", ok, stats or [])


def paired(a: Callable[[], float], b: Callable[[], float], rounds: int) -> tuple[list[float], list[float]]:
    """Interleaved measurements of two things, the order swapped every round so that drift hits both alike."""
    first: list[float] = []
    second: list[float] = []
    for index in range(rounds):
        for take, into in ((a, first), (b, second)) if index % 2 == 0 else ((b, second), (a, first)):
            into.append(take())
    return first, second


def median_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Median of the ratios of pairs: one disturbed pair moves it little."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def number(value: float | None) -> str:
    if value is None:
        return ""
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def ratio_text(value: float | None) -> str:
    if value is None:
        return ""
    return f"1/{1 / value:.0f}" if 0 < value < 0.05 else f"{value:.3f}"


def show(rows: Iterable[Row], title: str = "") -> None:
    table = Table(title=title or None, title_justify="left")
    for column in ("", "value", "unit", "baseline", "ratio", "bar", ""):
        table.add_column(column, justify="right" if column in ("value", "baseline", "ratio") else "left")
    for r in rows:
        verdict = {True: "[green]ok[/]", False: "[red]MISSED[/]", None: ""}[r.ok]
        table.add_row(r.name, number(r.value), r.unit, number(r.baseline), ratio_text(r.ratio), r.bar, verdict)
    Console(width=130).print(table)


def save(rows: Iterable[Row], path: Path) -> None:
    path.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")
