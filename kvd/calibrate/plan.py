"""What a calibration will do, and how long it takes: beforehand by estimate, then by what its stages took. Pure.

In full: native twice, every preset, the tables that the search proposes. Short, for keys alone, values alone and each
layer: the prefix as native KV has it is quantised once and only the last positions go through the model, so errors
within the prefix do not build up on each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvd.calibrate.result import ENOUGH, Calibration
from kvd.calibrate.search import LADDER

TOKENS_CPU: Final = 2048
WINDOW: Final = 256
LAYER_WINDOW: Final = 128
"""positions compared for one layer"""
TRIES: Final = 3
"""tables of the search that are measured in full, at most"""
TABLES: Final = 2
"""how many it usually takes"""
ANSWER: Final = 24
"""tokens of an answer"""
ATTENTION_CPU: Final = 5.5
"""How much more a product of attention costs than one of weights with as many operations, on the CPU backend:
2.9e-3 n + 2.06e-6 n^2 seconds for n tokens of a model of 135M weights with 576 x 30 query elements."""
ATTENTION_GPU: Final = 1.5


@dataclass(frozen=True, slots=True)
class Plan:
    """presets: names beside native. sides: (side, bits) alone. layers: how many, each side alone."""

    presets: tuple[str, ...]
    sides: tuple[tuple[str, int], ...]
    layers: int
    tokens: int
    window: int
    layer_window: int


@dataclass(frozen=True, slots=True)
class Stage:
    """count of one kind, and about how many seconds each takes."""

    count: int
    seconds: float


Stages = Mapping[str, Stage]
"""by kind: native, preset, side, layer, table"""


def make(presets: Sequence[str], layers: int, tokens: int, window: int) -> Plan:
    names = tuple(name for name in dict.fromkeys(presets) if name != "native")
    sides = tuple((side, bits) for side in ("k", "v") for bits in LADDER)
    return Plan(names, sides, layers, tokens, window, min(LAYER_WINDOW, window))


def default_tokens(backend: str, context: int | None) -> int:
    """8,192 or the model's limit; on the CPU 2,048, since attention makes 8,192 take some 13 times as long."""
    return min(TOKENS_CPU if backend == "cpu" else ENOUGH, context or ENOUGH)


def stages(plan: Plan, row_s: float, share: float, step_s: float) -> dict[str, Stage]:
    """row_s: of one row of a chunk at the start of a text. share: operations of attention per row and position behind
    it, in units of one row's products with the weights. step_s: of one decode step."""
    n = plan.tokens
    whole = row_s * (n + share * n * n / 2) + 2 * ANSWER * step_s
    behind = row_s * (1 + share * n)
    return {
        "native": Stage(2, whole),
        "preset": Stage(len(plan.presets), whole),
        "side": Stage(len(plan.sides), plan.window * behind),
        "layer": Stage(plan.layers, 2 * plan.layer_window * behind),
        "table": Stage(TABLES, whole),
    }


def remaining(stages: Stages, plan: Plan, known: Calibration | None) -> dict[str, Stage]:
    """Without what is known. Native is measured once more where anything else is."""
    if known is None:
        return dict(stages)
    new = sum(known.setting(name) is None for name in plan.presets)
    counts = {"native": 1, "preset": new, "side": 0, "layer": 0, "table": 1}
    return {kind: replace(stage, count=counts[kind]) for kind, stage in stages.items()}


class Pace:
    """How far a run is, in time: what stages took so far tells what the others will take. clock: in seconds."""

    def __init__(self, stages: Stages, clock: Callable[[], float] = time.monotonic) -> None:
        self._stages, self._clock = stages, clock
        self._took: dict[str, list[float]] = {}
        self._kind, self._since, self._began = "", clock(), clock()

    def begin(self, kind: str) -> None:
        """The stage before has ended, one of this kind begins. "" ends the last."""
        now = self._clock()
        if self._kind:
            self._took.setdefault(self._kind, []).append(now - self._since)
        self._kind, self._since = kind, now

    @property
    def left(self) -> float:
        """Seconds until the end."""
        now, waiting = self._clock(), 0.0
        for kind, stage in self._stages.items():
            rest = stage.count - len(self._took.get(kind, ())) - (kind == self._kind)
            waiting += max(0, rest) * self._expected(kind)
        running = max(0.0, self._expected(self._kind) - (now - self._since)) if self._kind else 0.0
        return waiting + running

    @property
    def share(self) -> float:
        """Of the whole time that has gone."""
        gone = self._clock() - self._began
        return gone / (gone + self.left) if gone else 0.0

    def _expected(self, kind: str) -> float:
        if took := self._took.get(kind):
            return sum(took) / len(took)
        known = [(sum(took), len(took) * self._stages[name].seconds) for name, took in self._took.items()]
        estimated = sum(estimate for _, estimate in known)
        scale = sum(took for took, _ in known) / estimated if estimated else 1.0
        return scale * self._stages[kind].seconds
