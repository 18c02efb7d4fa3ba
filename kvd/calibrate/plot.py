"""Quality against memory as an SVG: each setting a point, divergence on a logarithmic axis. Written by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from kvd.calibrate.result import AGAIN, NATIVE, Calibration, Setting
from kvd.calibrate.table import labels

WIDTH: Final = 720
HEIGHT: Final = 440
LEFT: Final = 80
RIGHT: Final = 30
TOP: Final = 60
BOTTOM: Final = 60
STYLE: Final = """
text{font:13px system-ui,sans-serif;fill:#222}.small{font-size:11px;fill:#666}.axis{stroke:#999}.grid{stroke:#ddd}
.gate{stroke:#c33;stroke-dasharray:5 4}.gatetext{fill:#c33;font-size:11px}.ok{fill:#1a7f4b}.bad{fill:#b3541e}
.back{fill:#fff}.noise{stroke:#999;stroke-dasharray:2 4}
@media (prefers-color-scheme:dark){text{fill:#eee}.small{fill:#aaa}.grid{stroke:#333}.back{fill:#161616}
.ok{fill:#4fc98a}.bad{fill:#f0a06a}.gate{stroke:#f77}.gatetext{fill:#f77}}
"""


def svg(found: Calibration) -> str:
    """Settings but native (whose divergence is 0); the gate and what rounding does as lines."""
    items = [item for item in found.settings if item.name not in (NATIVE, AGAIN)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="KV precisions of {escape(found.model)}: divergence against bytes per token">',
        f"<style>{STYLE}</style>", f'<rect class="back" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text x="{LEFT}" y="26" font-weight="600">{escape(found.model)}: what KV precisions cost</text>',
        f'<text class="small" x="{LEFT}" y="44">{found.tokens:,} tokens of {escape(found.text)}, mean KL divergence '
        f"from native KV over the last {found.window}</text>",
    ]  # fmt: skip
    if items:
        parts.extend(_plot(items, found))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _plot(items: Sequence[Setting], found: Calibration) -> Iterator[str]:
    most = max(item.bytes_per_token for item in items) * 1.08
    values = [max(item.quality.kld_mean, 1e-9) for item in items] + [found.gate.max_kld]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)

    def x(size: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * size / most

    def y(divergence: float) -> float:
        share = (math.log10(max(divergence, 1e-9)) - low) / (high - low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    for power in range(low, high + 1):
        at = y(10**power)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text class="small" x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">1e{power}</text>'
    yield f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>'
    for step in _ticks(most):
        yield f'<text class="small" x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step:,}</text>'
    yield f'<text class="small" x="{WIDTH - RIGHT}" y="{HEIGHT - 18}" text-anchor="end">bytes of KV per token</text>'
    gate = y(found.gate.max_kld)
    yield f'<line class="gate" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{gate:.1f}" y2="{gate:.1f}"/>'
    yield (
        f'<text class="gatetext" x="{LEFT + 6}" y="{gate - 5:.1f}">gate: {found.gate.max_kld:g}, and the same top '
        f"token at {found.gate.min_same_top:.0%}</text>"
    )
    again, called = found.setting(AGAIN), labels(found)
    if again is not None and again.quality.kld_mean > 10**low:
        noise = y(again.quality.kld_mean)
        yield f'<line class="noise" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{noise:.1f}" y2="{noise:.1f}"/>'
        yield f'<text class="small" x="{LEFT + 6}" y="{noise - 5:.1f}">rounding: native in other chunks</text>'
    taken: list[tuple[float, float]] = []
    for item in sorted(items, key=lambda one: one.quality.kld_mean):
        across, down = x(item.bytes_per_token), y(item.quality.kld_mean)
        kind = "ok" if item.quality.passes(found.gate) else "bad"
        label = f"{called[item.name]} · {item.quality.same_top:.1%}"
        shift = 4.0
        while any(abs(across - left) < 100 and abs(down + shift - top) < 14 for left, top in taken):
            shift += 14
        taken.append((across, down + shift))
        yield (
            f'<circle class="{kind}" cx="{across:.1f}" cy="{down:.1f}" r="5"><title>{escape(item.name)}: '
            f"{item.bytes_per_token:,} bytes, {item.quality.kld_mean:.3g}</title></circle>"
        )
        anchor, move = ("start", 9) if across < WIDTH - 160 else ("end", -9)
        yield f'<text x="{across + move:.1f}" y="{down + shift:.1f}" text-anchor="{anchor}">{escape(label)}</text>'


def _ticks(most: float) -> list[int]:
    """Round numbers from 0, four to eight of them."""
    power = 10 ** math.floor(math.log10(most))
    step = next(power * part for part in (0.1, 0.2, 0.25, 0.5, 1) if most / (power * part) <= 8)
    return [int(step * i) for i in range(int(most / step) + 1)]
