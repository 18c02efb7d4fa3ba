"""A calibration from first to last, over a loaded model. Runs on the thread that loaded it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvclient.errors import BadRequest
from kvd.cache import precision
from kvd.cache.layout import KVLayout
from kvd.calibrate import search, trial
from kvd.calibrate.compare import Reference
from kvd.calibrate.material import Material
from kvd.calibrate.plan import TRIES, Plan
from kvd.calibrate.result import Gate, LayerCost, OneSided, Quality, Setting
from kvd.calibrate.search import ANCHOR, Costs
from kvd.calibrate.trial import Means, Prefilled

METHOD: Final = (
    "Settings: prefilled through the quantised pool, compared over the last positions in one teacher-forced chunk. "
    "K or V alone, and single layers: the prefix of native KV quantised once, so that errors within it do not add up; "
    "they order tables, the chosen one is measured like every setting."
)
SAFETY: Final = 0.8
"""share of the gate that a predicted table may use"""
TINY: Final = 1e-12


@dataclass(frozen=True, slots=True)
class Findings:
    settings: tuple[Setting, ...]
    sides: tuple[OneSided, ...]
    layers: tuple[LayerCost, ...]
    best: str
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Native:
    """What everything is compared with. The pool stays: short runs take their prefix from it."""

    filled: Prefilled
    reference: Reference
    answers: list[list[int]]
    setting: Setting


class Run:
    """say(text) is told what comes next."""

    def __init__(
        self, means: Means, layout: KVLayout, material: Material, plan: Plan, gate: Gate,
        decode: Callable[[list[int]], str], say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._means, self._layout, self._material, self._plan = means, layout, material, plan
        self._gate, self._decode, self._say = gate, decode, say
        self._warnings: list[str] = []

    def everything(self, budget: int | None) -> Findings:
        """Raises BadRequest where no precision but native fits the model, or none fits the budget."""
        layouts = self._layouts()
        self._say("native")
        native = self._native()
        settings = [native.setting]
        for name, layout in layouts.items():
            self._say(name)
            settings.append(self._setting(name, layout, native))
        sides = self._sides(native)
        layers = self._layers(native)
        costs = self._costs(sides, layers)
        settings += self._tables(costs, settings, native, budget)
        best = choose_best(settings, self._gate, budget)
        return Findings(tuple(settings), tuple(sides), tuple(layers), best, tuple(self._warnings))

    # --- which settings the model takes

    def _layouts(self) -> dict[str, KVLayout]:
        found: dict[str, KVLayout] = {}
        problems: list[BadRequest] = []
        for name in self._plan.full:
            if name == "native":
                continue
            try:
                found[name] = precision.apply(self._layout, name)
            except BadRequest as problem:
                problems.append(problem)
                self._warnings.append(f"{name} left out: {problem.message}")
        if problems and not found:
            raise problems[0]
        return found

    # --- in full

    def _native(self) -> Native:
        material, means = self._material, self._means
        filled = trial.prefill(means, self._layout, material)
        answers, first_s = trial.answer(means, filled, material.questions)
        needles = sum(trial.recalled(means, filled, probe) for probe in material.probes)
        logits = trial.window(means, filled, material.window)
        reference = Reference.of(logits, material.window, material.following)
        del logits
        filled.sequence.truncate(len(material.prefix))
        same = Quality(0.0, 0.0, 1.0, 1.0)
        setting = self._row("native", self._layout, filled, same, answers, answers, needles, first_s)
        return Native(filled, reference, answers, setting)

    def _setting(self, name: str, layout: KVLayout, native: Native) -> Setting:
        material, means = self._material, self._means
        filled = trial.prefill(means, layout, material)
        answers, first_s = trial.answer(means, filled, material.questions)
        needles = sum(trial.recalled(means, filled, probe) for probe in material.probes)
        quality = native.reference.quality(trial.window(means, filled, material.window))
        filled.sequence.close()
        return self._row(name, layout, filled, quality, answers, native.answers, needles, first_s)

    def _row(
        self, name: str, layout: KVLayout, filled: Prefilled, quality: Quality, answers: list[list[int]],
        expected: list[list[int]], needles: int, first_s: float,
    ) -> Setting:  # fmt: skip
        blocks = -(-self._material.tokens // self._means.block)
        pairs = list(zip(answers, expected, strict=True))
        asked = [(ids, words) for ids, words in zip(answers, self._material.expects, strict=True) if words]
        right = sum(any(word in self._decode(ids) for word in words) for ids, words in asked)
        return Setting(
            name=name,
            bytes_per_token=layout.bytes_per_token(),
            measured_bytes_per_token=filled.pool_bytes / (blocks * self._means.block),
            quality=quality,
            needles=(needles, len(self._material.probes)),
            facts=(right, len(asked)),
            answers_equal=(sum(a == b for a, b in pairs), len(pairs)),
            answer_agreement=sum(common(a, b) / len(b) for a, b in pairs) / max(1, len(pairs)),
            peak_bytes=filled.peak_bytes,
            ttft_s=filled.seconds + first_s,
        )

    # --- one side, one layer

    def _short(self, layout: KVLayout, native: Native, positions: int) -> Quality:
        """The last `positions` of the window, behind the prefix and the rest of the window of native KV."""
        material = self._material
        skipped = len(material.window) - positions
        shifted = replace(
            material, prefix=(*material.prefix, *material.window[:skipped]), window=material.window[skipped:]
        )
        filled = trial.transplant(self._means, layout, shifted, native.filled)
        logits = trial.window(self._means, filled, shifted.window)
        filled.sequence.close()
        return native.reference.last(positions).quality(logits)

    def _sides(self, native: Native) -> list[OneSided]:
        found = []
        for side, bits in self._plan.sides:
            self._say(f"{side.upper()} alone at {bits} bits")
            layout = precision.apply(self._layout, f"k{bits}v16" if side == "k" else f"k16v{bits}")
            found.append(OneSided(side, bits, self._short(layout, native, len(self._material.window))))
        return found

    def _layers(self, native: Native) -> list[LayerCost]:
        """The rest of the window, as native KV has it, is part of the prefix here: fewer rows go through the model."""
        positions = min(self._plan.layer_window, len(self._material.window))
        if skipped := len(self._material.window) - positions:
            trial.window(self._means, native.filled, self._material.window[:skipped])
        found = []
        for layer in range(self._plan.layers):
            self._say(f"layer {layer} alone at {ANCHOR} bits")
            alone = [self._short(self._one(side, layer), native, positions).kld_mean for side in ("k", "v")]
            found.append(LayerCost(layer, alone[0], alone[1], ANCHOR))
        return found

    def _one(self, side: str, layer: int) -> KVLayout:
        name = f"k{ANCHOR}v16" if side == "k" else f"k16v{ANCHOR}"
        return precision.apply(self._layout, f"native,{layer}={name}")

    # --- the search

    def _costs(self, sides: Sequence[OneSided], layers: Sequence[LayerCost]) -> Costs:
        whole = {(item.side, item.bits): max(item.quality.kld_mean, TINY) for item in sides}
        nbytes: dict[tuple[str, int, int], int] = {}
        for bits in search.LADDER:
            for part in precision.apply(self._layout, f"k{bits}v{bits}").parts:
                key = (part.side, part.layer, bits)
                nbytes[key] = nbytes.get(key, 0) + part.nbytes(1)
        anchor = {("k", x.layer): max(x.k, TINY) for x in layers} | {("v", x.layer): max(x.v, TINY) for x in layers}
        growth = {(side, bits): value / whole[side, ANCHOR] for (side, bits), value in whole.items()}
        return Costs(anchor, growth, nbytes, len(layers))

    def _tables(self, costs: Costs, measured: Sequence[Setting], native: Native, budget: int | None) -> list[Setting]:
        path = search.descend(costs)
        if budget is not None:
            table = search.within(path, costs, budget)
            if table is None:
                least = costs.bytes_of(path[-1])
                raise BadRequest(
                    f"no table takes {budget} bytes per token, the least is {least}", budget=budget, least=least
                )
            return self._measured([table], measured, native)
        limit = SAFETY * self._gate.max_kld / self._scale(costs, measured)
        found: list[Setting] = []
        for _ in range(TRIES):
            table = search.lightest(path, costs, limit)
            if table is None:
                break
            found += self._measured([table], [*measured, *found], native)
            if not found or found[-1].quality.passes(self._gate):
                break
            limit /= 2
        return found

    def _measured(self, tables: Sequence[search.Table], known: Sequence[Setting], native: Native) -> list[Setting]:
        found = []
        for table in tables:
            name = self._text(table)
            if any(setting.name == name for setting in known):
                continue
            self._say("the table of the search")
            found.append(self._setting(name, precision.apply(self._layout, name), native))
        return found

    def _text(self, table: search.Table) -> str:
        layers = [f"{i}=k{k}v{v}" for i, (k, v) in enumerate(table)]
        made = precision.apply(self._layout, ",".join(["native", *layers]))
        return precision.text_of([x.k for x in made.layers], [x.v for x in made.layers])

    def _scale(self, costs: Costs, measured: Sequence[Setting]) -> float:
        """How much more a uniform setting cost in full than predicted, at worst; at least 1."""
        ratios = [1.0]
        for setting in measured:
            for k in search.LADDER:
                for v in search.LADDER:
                    if setting.name == f"k{k}v{v}":
                        ratios.append(setting.quality.kld_mean / costs.predicted(((k, v),) * costs.layers))
        return max(ratios)


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """Leading tokens that are equal."""
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count


def choose_best(settings: Sequence[Setting], gate: Gate, budget: int | None) -> str:
    """Of what passed: within a budget the one closest to native, without one the smallest. Empty where none passed."""
    passed = [item for item in settings if item.name != "native" and item.quality.passes(gate)]
    if budget is not None:
        passed = [item for item in passed if item.bytes_per_token <= budget]
        return min(passed, key=lambda item: item.quality.kld_mean).name if passed else ""
    return min(passed, key=lambda item: (item.bytes_per_token, item.quality.kld_mean)).name if passed else ""


def stops_of(tokenizer: Any) -> frozenset[int]:
    return frozenset(int(token) for token in tokenizer.eos_token_ids)
