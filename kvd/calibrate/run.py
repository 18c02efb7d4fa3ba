"""A calibration from first to last, over a loaded model. Runs on the thread that loaded it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import mlx.core as mx

from kvclient.errors import BadRequest
from kvd.cache import precision
from kvd.cache.chain import common_prefix
from kvd.cache.layout import KVLayout
from kvd.calibrate import trial
from kvd.calibrate.compare import NotFinite, Reference
from kvd.calibrate.material import Material
from kvd.calibrate.plan import Plan
from kvd.calibrate.proposals import Proposals, check_budget, costs_of
from kvd.calibrate.result import AGAIN, NATIVE, Calibration, Gate, LayerCost, OneSided, Quality, Setting
from kvd.calibrate.resume import Resume
from kvd.calibrate.search import ANCHOR
from kvd.calibrate.trial import Prefilled, Setup

METHOD: Final = (
    "Settings: prefilled through the quantised pool, compared over the last positions in one teacher-forced chunk. "
    f"{AGAIN.capitalize()}: in other chunks, so what it shows is rounding. K or V alone, and single layers: the prefix "
    "of native KV quantised once, so that errors within it do not add up; they order tables, the chosen one is "
    "measured like every setting."
)


@dataclass(frozen=True, slots=True)
class Findings:
    """What a run found. best: text of the best table that passed, empty where none did."""

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
    """say(kind, text) is told which stage comes next, of which kind of `plan.Stages`. known: what was measured before
    on the same basis; it is taken over.

    Raises BadRequest where no precision but native fits the model, or none fits the budget.
    """

    def __init__(
        self, setup: Setup, layout: KVLayout, material: Material, plan: Plan, gate: Gate, budget: int | None,
        decode: Callable[[list[int]], str], say: Callable[[str, str], None], known: Calibration | None = None,
    ) -> None:  # fmt: skip
        self._setup, self._layout, self._material, self._plan = setup, layout, material, plan
        self._gate, self._budget, self._decode, self._say, self._known = gate, budget, decode, say, known
        self._warnings: list[str] = []
        self._tables_made = 0
        self._reference: Native | None = None
        check_budget(layout, budget)
        self._layouts = self._fitting()

    def everything(self) -> Findings:
        settings = list(self._known.settings) if self._known else [self._native.setting, self._again()]
        for name, layout in self._layouts.items():
            if any(item.name == name for item in settings):
                continue
            try:
                settings.append(self._setting("preset", name, layout))
            except NotFinite as problem:
                self._warnings.append(f"{name} left out: {problem.message}")
        sides = list(self._known.sides) if self._known else self._sides()
        layers = list(self._known.layers) if self._known else self._layers()
        self._tables(settings, sides, layers)
        best = choose_best(settings, self._gate, self._budget)
        again = next(item for item in settings if item.name == AGAIN)
        if not again.quality.passes(self._gate):
            self._warnings.append(
                f"native KV in other chunks does not pass the gate: rounding in {self._layout.dtype} hides what "
                "precisions cost"
            )
        return Findings(tuple(ordered(settings)), tuple(sides), tuple(layers), best, tuple(self._warnings))

    # --- which settings the model takes

    def _fitting(self) -> dict[str, KVLayout]:
        found: dict[str, KVLayout] = {}
        problems: list[BadRequest] = []
        for name in self._plan.presets:
            try:
                found[name] = precision.apply(self._layout, name)
            except BadRequest as problem:
                problems.append(problem)
                self._warnings.append(f"{name} left out: {problem.message}")
        if problems and not found:
            raise problems[0]
        return found

    # --- in full

    @property
    def _native(self) -> Native:
        """Measured when it is needed first: not where everything is known."""
        if self._reference is None:
            self._reference = self._measured_native()
        return self._reference

    def _measured_native(self) -> Native:
        self._say("native", NATIVE)
        material, setup = self._material, self._setup
        filled = trial.prefill(setup, self._layout, material)
        answers, first_s = trial.answer(setup, filled, material.questions)
        needles = sum(trial.recalled(setup, filled, probe) for probe in material.probes)
        logits = trial.window(setup, filled, material.window)
        reference = Reference.of(logits, material.window, material.following)
        del logits
        filled.sequence.truncate(len(material.prefix))
        same = Quality(0.0, 0.0, 1.0, 1.0)
        setting = self._row(NATIVE, self._layout, filled, same, answers, answers, needles, first_s)
        return Native(filled, reference, answers, setting)

    def _again(self) -> Setting:
        """Native in chunks of half the size: the products have other shapes, so it shows what rounding does."""
        halved = replace(self._setup, chunk=self._setup.chunk // 2)
        return self._setting("native", AGAIN, self._layout, halved, passes=2)

    def _setting(self, kind: str, name: str, layout: KVLayout, setup: Setup | None = None, passes: int = 1) -> Setting:
        material, setup, native = self._material, setup or self._setup, self._native
        self._tables_made += kind == "table"
        self._say(kind, f"table {self._tables_made} of the search" if kind == "table" else name)
        filled = trial.prefill(setup, layout, material)
        answers, first_s = trial.answer(setup, filled, material.questions)
        needles = sum(trial.recalled(setup, filled, probe) for probe in material.probes)
        quality = native.reference.quality(trial.window(setup, filled, material.window, passes))
        filled.sequence.close()
        return self._row(name, layout, filled, quality, answers, native.answers, needles, first_s)

    def _row(
        self, name: str, layout: KVLayout, filled: Prefilled, quality: Quality, answers: list[list[int]],
        expected: list[list[int]], needles: int, first_s: float,
    ) -> Setting:  # fmt: skip
        blocks = -(-self._material.tokens // self._setup.block)
        pairs = list(zip(answers, expected, strict=True))
        asked = [(ids, words) for ids, words in zip(answers, self._material.expects, strict=True) if words]
        right = sum(any(word in self._decode(ids) for word in words) for ids, words in asked)
        return Setting(
            name=name,
            bytes_per_token=layout.bytes_per_token(),
            measured_bytes_per_token=filled.pool_bytes / (blocks * self._setup.block),
            quality=quality,
            needles=(needles, len(self._material.probes)),
            facts=(right, len(asked)),
            answers_equal=(sum(a == b for a, b in pairs), len(pairs)),
            answer_agreement=sum(common_prefix(a, b) / len(b) for a, b in pairs) / max(1, len(pairs)),
            peak_bytes=filled.peak_bytes,
            ttft_s=filled.seconds + first_s,
        )

    # --- one side, one layer

    def _short(self, layout: KVLayout, positions: int) -> Quality:
        """The last `positions` of the window, behind the prefix and the rest of the window of native KV."""
        material, native = self._material, self._native
        first, last = _split(material.window, positions)
        shifted = replace(material, prefix=(*material.prefix, *first), window=last)
        filled = trial.transplant(self._setup, layout, shifted, native.filled)
        logits = trial.window(self._setup, filled, shifted.window)
        filled.sequence.close()
        return native.reference.last(positions).quality(logits)

    def _sides(self) -> list[OneSided]:
        found = []
        for side, bits in self._plan.sides:
            self._say("side", f"{side.upper()} alone at {bits} bits")
            layout = precision.apply(self._layout, f"k{bits}v16" if side == "k" else f"k16v{bits}")
            found.append(OneSided(side, bits, self._short(layout, len(self._material.window))))
        return found

    def _layers(self) -> list[LayerCost]:
        """The rest of the window, as native KV has it, is part of the prefix here: fewer rows go through the model."""
        positions = min(self._plan.layer_window, len(self._material.window))
        filled, (first, last) = self._native.filled, _split(self._material.window, positions)
        if first:
            trial.window(self._setup, filled, first)
        before = filled.sequence.rows

        def native() -> mx.array:
            logits = trial.window(self._setup, filled, last)
            filled.sequence.truncate(before)
            return logits

        resume, found = Resume(self._setup.model, native), []
        for layer in range(self._plan.layers):
            self._say("layer", f"layer {layer} alone at {ANCHOR} bits")
            with resume.at(layer):
                alone = [self._short(self._one(side, layer), positions).kld_mean for side in ("k", "v")]
            found.append(LayerCost(layer, alone[0], alone[1], ANCHOR))
        return found

    def _one(self, side: str, layer: int) -> KVLayout:
        name = f"k{ANCHOR}v16" if side == "k" else f"k16v{ANCHOR}"
        return precision.apply(self._layout, f"native,{layer}={name}")

    # --- the search

    def _tables(self, settings: list[Setting], sides: Sequence[OneSided], layers: Sequence[LayerCost]) -> None:
        """Measures what is proposed and adds it to `settings`."""
        costs = costs_of(self._layout, sides, layers)
        proposals = Proposals(self._layout, costs, self._gate, self._budget)
        while (name := proposals.following(settings)) is not None:
            known = next((item for item in settings if item.name == name), None)
            if known is not None:
                settings.remove(known)
                settings.append(known)
                continue
            settings.append(self._setting("table", name, precision.apply(self._layout, name)))


def ordered(settings: Sequence[Setting]) -> list[Setting]:
    """Native, presets as they are always listed, other names, tables."""
    names = (NATIVE, AGAIN, *precision.PRESETS[1:])

    def rank(item: Setting) -> int:
        return names.index(item.name) if item.name in names else len(names) + ("," in item.name)

    return sorted(settings, key=rank)


def _split(window: tuple[int, ...], positions: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """All but the last `positions`, and those."""
    return window[: len(window) - positions], window[len(window) - positions :]


def choose_best(settings: Sequence[Setting], gate: Gate, budget: int | None) -> str:
    """Of what passed: within a budget the one closest to native, without one the smallest. Empty where none passed."""
    passed = [item for item in settings if item.name not in (NATIVE, AGAIN) and item.quality.passes(gate)]
    if budget is not None:
        passed = [item for item in passed if item.bytes_per_token <= budget]
        return min(passed, key=lambda item: item.quality.kld_mean).name if passed else ""
    return min(passed, key=lambda item: (item.bytes_per_token, item.quality.kld_mean)).name if passed else ""


def stops_of(tokenizer: Any) -> frozenset[int]:
    return frozenset(int(token) for token in tokenizer.eos_token_ids)
