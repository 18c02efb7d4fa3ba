"""A calibration as text for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvd.calibrate.result import AGAIN, NATIVE, Calibration, LayerCost, Setting
from kvd.units import format_size

HEAD = ("KV", "bytes/token", "of native", "mean KLD", "p99 KLD", "same top", "perplexity", "needles", "facts",
        "same answers", "peak", "first token", "gate")  # fmt: skip
EXTREMES = 3


def lines(found: Calibration) -> Iterator[str]:
    """The whole report, line by line."""
    yield (
        f"{found.model}: {found.tokens:,} tokens of {found.text}, the last {found.window} compared; KV in {found.dtype}"
        f", {found.backend}"
    )
    if found.tokens < found.enough:
        yield f"(shorter than the {found.enough:,} tokens that would say enough: long contexts may differ)"
    yield ""
    native, called = found.setting(NATIVE), labels(found)
    yield from aligned([HEAD, *(_row(called[item.name], item, native, found) for item in found.settings)])
    for name, label in called.items():
        if label != name:
            yield f"  {label}: {name}"
    if found.sides:
        yield ""
        yield from aligned([("one side alone", "mean KLD", "p99 KLD", "same top"), *_sides(found)])
    if found.layers:
        yield ""
        yield from _layers(found)
    yield ""
    yield found.method
    for warning in found.warnings:
        yield f"note: {warning}"
    yield verdict(found)


def verdict(found: Calibration) -> str:
    gate = f"mean KLD <= {found.gate.max_kld:g} and the same top token at >= {found.gate.min_same_top:.0%}"
    if not found.best:
        within = f" within {found.budget:,} bytes per token" if found.budget is not None else ""
        return f"Nothing{within} passed ({gate}): `kvd load {found.model} --kv auto` stays native."
    best = found.setting(found.best)
    size = f", {best.bytes_per_token:,} bytes per token" if best else ""
    return f"`kvd load {found.model} --kv auto` takes {labels(found).get(found.best, found.best)}{size}. Gate: {gate}."


def aligned(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Columns: the first to the left, the others to the right."""
    table = list(rows)
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for row in table:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()


def labels(found: Calibration) -> dict[str, str]:
    """What each setting is called for short: tables, whose names may be long, are numbered."""
    tables = [item.name for item in found.settings if "," in item.name]
    numbered = {name: f"table {i}" if len(tables) > 1 else "table" for i, name in enumerate(tables, 1)}
    return {item.name: numbered.get(item.name, item.name) for item in found.settings}


def _row(label: str, item: Setting, native: Setting | None, found: Calibration) -> tuple[str, ...]:
    q = item.quality
    share = f"{item.bytes_per_token / native.bytes_per_token:.0%}" if native else ""
    passed = "" if item.name in (NATIVE, AGAIN) else "passed" if q.passes(found.gate) else "failed"
    facts = f"{item.facts[0]}/{item.facts[1]}" if item.facts[1] else "-"
    return (
        label, f"{item.bytes_per_token:,}", share, f"{q.kld_mean:.2g}", f"{q.kld_p99:.2g}",
        f"{q.same_top:.1%}", f"{q.perplexity_ratio:.4f}", f"{item.needles[0]}/{item.needles[1]}", facts,
        f"{item.answers_equal[0]}/{item.answers_equal[1]} ({item.answer_agreement:.0%})", format_size(item.peak_bytes),
        f"{item.ttft_s:.2f} s", passed,
    )  # fmt: skip


def _sides(found: Calibration) -> Iterator[tuple[str, ...]]:
    for item in found.sides:
        q = item.quality
        yield (f"{item.side.upper()} {item.bits} bits", f"{q.kld_mean:.2g}", f"{q.kld_p99:.2g}", f"{q.same_top:.1%}")


def _layers(found: Calibration) -> Iterator[str]:
    yield f"layers alone at {found.layers[0].bits} bits, mean KLD:"
    rows = [("layer", *(str(x.layer) for x in found.layers)), ("K", *(f"{x.k:.0e}" for x in found.layers)),
            ("V", *(f"{x.v:.0e}" for x in found.layers))]  # fmt: skip
    for start in range(1, len(rows[0]), 12):
        yield from aligned([(row[0], *row[start : start + 12]) for row in rows])
    ranked = sorted(found.layers, key=total, reverse=True)
    whole = sum(map(total, found.layers)) or 1.0
    worst = ", ".join(f"{x.layer} ({total(x) / whole:.0%})" for x in ranked[:EXTREMES])
    ends = total(found.layers[0]) + total(found.layers[-1])
    yield f"most sensitive: layers {worst}; first and last layer together {ends / whole:.0%} of the sum"


def total(cost: LayerCost) -> float:
    return cost.k + cost.v
