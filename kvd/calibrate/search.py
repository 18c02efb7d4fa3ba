"""The search for the best table: layer by layer, the bits that cost the least divergence per byte. Pure.

Small independent errors add up in the KL divergence, so a table's is predicted as the sum over layers and sides of what
was measured with that side of that layer alone at `ANCHOR` bits, times how the whole side's divergence grew from
`ANCHOR` to the asked bits. A prediction only orders candidates: the winner is measured in full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

LADDER: Final = (8, 6, 5, 4)
ANCHOR: Final = 4
Side = str
Table = tuple[tuple[int, int], ...]
"""(K bits, V bits) of each layer"""


@dataclass(frozen=True, slots=True)
class Costs:
    """at_anchor: (side, layer) -> divergence with it alone at ANCHOR bits. growth: (side, bits) -> divergence of the
    whole side at these bits over that at ANCHOR. nbytes: (side, layer, bits) -> bytes per token."""

    at_anchor: Mapping[tuple[Side, int], float]
    growth: Mapping[tuple[Side, int], float]
    nbytes: Mapping[tuple[Side, int, int], int]
    layers: int

    def divergence(self, side: Side, layer: int, bits: int) -> float:
        return self.at_anchor[side, layer] * self.growth[side, bits]

    def predicted(self, table: Table) -> float:
        pairs = enumerate(table)
        return sum(self.divergence("k", i, k) + self.divergence("v", i, v) for i, (k, v) in pairs)

    def bytes_of(self, table: Table) -> int:
        return sum(self.nbytes["k", i, k] + self.nbytes["v", i, v] for i, (k, v) in enumerate(table))


def descend(costs: Costs) -> list[Table]:
    """Tables from everything at the first step of the ladder to everything at its last, each one step of one side of
    one layer below the one before: the step with the least predicted divergence per byte it saves."""
    bits = {(side, layer): 0 for side in ("k", "v") for layer in range(costs.layers)}
    path = [_table(bits, costs.layers)]
    while steps := [key for key, at in bits.items() if at + 1 < len(LADDER)]:
        taken = min(steps, key=lambda key: (_price(costs, key, LADDER[bits[key]], LADDER[bits[key] + 1]), key))
        bits[taken] += 1
        path.append(_table(bits, costs.layers))
    return path


def within(path: Sequence[Table], costs: Costs, budget: int) -> Table | None:
    """The first, and so the best predicted, table of the path that takes at most `budget` bytes per token."""
    return next((table for table in path if costs.bytes_of(table) <= budget), None)


def lightest(path: Sequence[Table], costs: Costs, limit: float) -> Table | None:
    """The last table of the path whose predicted divergence is at most `limit`."""
    return next((table for table in reversed(path) if costs.predicted(table) <= limit), None)


def _price(costs: Costs, key: tuple[Side, int], above: int, below: int) -> float:
    side, layer = key
    more = costs.divergence(side, layer, below) - costs.divergence(side, layer, above)
    saved = costs.nbytes[side, layer, above] - costs.nbytes[side, layer, below]
    return more / saved if saved > 0 else float("inf")


def _table(bits: Mapping[tuple[Side, int], int], layers: int) -> Table:
    return tuple((LADDER[bits["k", i]], LADDER[bits["v", i]]) for i in range(layers))
