"""What a calibration will do, and about how long it takes. Pure.

In full: native, every preset, the tables that the search proposes. Short, for keys alone, values alone and each layer:
the prefix as native KV has it is quantised once and only the last positions go through the model, so errors within the
prefix do not build up on each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvd.calibrate.search import ANCHOR, LADDER

TOKENS_GPU: Final = 8192
TOKENS_CPU: Final = 2048
WINDOW: Final = 256
LAYER_WINDOW: Final = 128
"""positions compared for one layer"""
TRIES: Final = 3
"""tables of the search that are measured in full, at most"""
ATTENTION_CPU: Final = 5.5
"""How much more a product of attention costs than one of weights with as many operations, on the CPU backend:
2.9e-3 n + 2.06e-6 n^2 seconds for n tokens of a model of 135M weights with 576 x 30 query elements."""
ATTENTION_GPU: Final = 1.5


@dataclass(frozen=True, slots=True)
class Plan:
    """full: names measured in full, native first. sides: (side, bits) alone. layers: how many, each side alone."""

    full: tuple[str, ...]
    sides: tuple[tuple[str, int], ...]
    layers: int
    tokens: int
    window: int
    layer_window: int

    @property
    def rows(self) -> int:
        """Rows that go through the model, about: what the progress bar counts to."""
        short = len(self.sides) * self.window + 2 * self.layers * self.layer_window
        return (len(self.full) + 1) * self.tokens + short


def make(presets: Sequence[str], layers: int, tokens: int, window: int) -> Plan:
    full = tuple(dict.fromkeys(("native", *presets)))
    sides = tuple((side, bits) for side in ("k", "v") for bits in LADDER)
    assert ANCHOR in LADDER
    return Plan(full, sides, layers, tokens, window, min(LAYER_WINDOW, window))


def default_tokens(backend: str, context: int | None) -> int:
    """8,192 or the model's limit; on the CPU 2,048, since attention makes 8,192 take some 13 times as long."""
    return min(TOKENS_CPU if backend == "cpu" else TOKENS_GPU, context or TOKENS_GPU)


def seconds(plan: Plan, row_s: float, share: float) -> float:
    """row_s: of one row at the start of a text. share: operations of attention per row and position behind it, in units
    of one row's products with the weights."""
    n = plan.tokens
    once = row_s * (n + share * n * n / 2)
    short = len(plan.sides) * plan.window + 2 * plan.layers * plan.layer_window
    return once * (len(plan.full) + 1) + short * row_s * (1 + share * n)
