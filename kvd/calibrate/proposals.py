"""Which tables the search has measured in full, one after the other. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvclient.errors import BadRequest
from kvd.cache import precision
from kvd.cache.layout import KVLayout
from kvd.calibrate import search
from kvd.calibrate.plan import TRIES
from kvd.calibrate.result import Gate, LayerCost, OneSided, Setting
from kvd.calibrate.search import ANCHOR, LADDER, Costs, Table

SAFETY: Final = 0.8
"""share of what the gate allows that a predicted table may use"""
STEP: Final = 0.5
"""share that the next prediction is lowered to at least: a smaller step would be lost in the noise of few positions"""
TINY: Final = 1e-12


def costs_of(layout: KVLayout, sides: Sequence[OneSided], layers: Sequence[LayerCost]) -> Costs:
    """layout: native, for the bytes of every layer."""
    whole = {(item.side, item.bits): max(item.quality.kld_mean, TINY) for item in sides}
    nbytes: dict[tuple[str, int, int], int] = {}
    for bits in LADDER:
        for part in precision.apply(layout, f"k{bits}v{bits}").parts:
            key = (part.side, part.layer, bits)
            nbytes[key] = nbytes.get(key, 0) + part.nbytes(1)
    anchor = {("k", x.layer): max(x.k, TINY) for x in layers} | {("v", x.layer): max(x.v, TINY) for x in layers}
    growth = {(side, bits): value / whole[side, ANCHOR] for (side, bits), value in whole.items()}
    return Costs(anchor, growth, nbytes, len(layers))


def check_budget(layout: KVLayout, budget: int | None) -> None:
    """Raises BadRequest where no table takes so few bytes per token."""
    least = precision.apply(layout, f"k{LADDER[-1]}v{LADDER[-1]}").bytes_per_token()
    if budget is not None and budget < least:
        raise BadRequest(
            f"no table takes {budget:,} bytes per token, the least is {least:,}", budget=budget, least=least
        )


class Proposals:
    """Within a budget the best predicted table; without one the lightest that should pass, then, as long as what was
    measured does not, one that should be as much better as it lacked."""

    def __init__(self, layout: KVLayout, costs: Costs, gate: Gate, budget: int | None) -> None:
        self._layout, self._costs, self._gate, self._budget = layout, costs, gate, budget
        self._path = search.descend(costs)
        self._limit: float | None = None
        self._made = 0

    def following(self, measured: Sequence[Setting]) -> str | None:
        """The next table's text, None for no more. measured: all so far, the proposal before this one last of all."""
        if self._made >= (TRIES if self._budget is None else 1):
            return None
        if self._budget is not None:
            table = search.within(self._path, self._costs, self._budget)
        else:
            if self._limit is not None and measured[-1].quality.passes(self._gate):
                return None
            self._limit = self._lowered(measured)
            table = search.lightest(self._path, self._costs, self._limit)
        self._made += 1
        return None if table is None else self._text(table)

    def _lowered(self, measured: Sequence[Setting]) -> float:
        """What a table may be predicted to cost. Near the gate the share of other tokens grows with the divergence."""
        if self._limit is None:
            return SAFETY * self._gate.max_kld / self._scale(measured)
        quality = measured[-1].quality
        divergence = self._gate.max_kld / max(quality.kld_mean, TINY)
        others = (1 - self._gate.min_same_top) / max(1 - quality.same_top, TINY)
        return self._limit * min(STEP, SAFETY * divergence, SAFETY * others)

    def _scale(self, measured: Sequence[Setting]) -> float:
        """How much more a uniform setting cost in full than predicted, at worst; at least 1."""
        ratios = [1.0]
        for setting in measured:
            for k in LADDER:
                for v in LADDER:
                    if setting.name == f"k{k}v{v}":
                        uniform = self._costs.predicted(((k, v),) * self._costs.layers)
                        ratios.append(setting.quality.kld_mean / uniform)
        return max(ratios)

    def _text(self, table: Table) -> str:
        layers = [f"{i}=k{k}v{v}" for i, (k, v) in enumerate(table)]
        made = precision.apply(self._layout, ",".join(["native", *layers]))
        return precision.text_of([x.k for x in made.layers], [x.v for x in made.layers])
