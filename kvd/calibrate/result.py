"""What a calibration found, and where it is kept: `models/<name>/calibration.json`. Standard library only.

Divergences are in nats, against the same model over native KV on the same text.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from kvd.atomic import write_text

FILE: Final = "calibration.json"
VERSION: Final = 2
NATIVE: Final = "native"
AGAIN: Final = "native again"
"""the setting that shows what rounding does: native KV, the text cut into other chunks"""
ENOUGH: Final = 8192
"""tokens from which a calibration says enough"""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Gate:
    """What a precision must reach to be used without a warning."""

    max_kld: float = 0.01
    """mean KL divergence"""
    min_same_top: float = 0.97
    """share of positions where the most likely token is native's"""


@dataclass(frozen=True, slots=True)
class Quality:
    """A setting against native KV over the last positions of the text."""

    kld_mean: float
    kld_p99: float
    same_top: float
    perplexity_ratio: float

    def passes(self, gate: Gate) -> bool:
        return self.kld_mean <= gate.max_kld and self.same_top >= gate.min_same_top


@dataclass(frozen=True, slots=True)
class Setting:
    """One precision measured in full: prefill into a pool of its own, questions, needles, the last positions.

    bytes_per_token by the layout's formula, measured_bytes_per_token by mlx's count of memory that the pool took.
    peak_bytes: most memory beyond the weights during the prefill. ttft_s: prefill of text and first question, first
    token. needles, facts: right ones of all. answers_equal: questions answered word for word as over native KV;
    answer_agreement: leading tokens in common, as a share.
    """

    name: str
    bytes_per_token: int
    measured_bytes_per_token: float
    quality: Quality
    needles: tuple[int, int]
    facts: tuple[int, int]
    answers_equal: tuple[int, int]
    answer_agreement: float
    peak_bytes: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class OneSided:
    """Only this side quantised, at `bits`; the other native. Prefix quantised once, see `Calibration.method`."""

    side: str
    bits: int
    quality: Quality


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Mean KL divergence with only this side of this layer quantised, at `bits`."""

    layer: int
    k: float
    v: float
    bits: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """tokens: length of the text in the cache, window: positions compared at its end. identity: of the model's files.
    basis: a digest of everything that decides what is measured; with an equal one, measurements are taken over.

    best: text of the best table found that passes the gate, empty where none does.
    """

    model: str
    identity: str
    basis: str
    tokens: int
    window: int
    context: int
    text: str
    backend: str
    dtype: str
    gate: Gate
    method: str
    settings: tuple[Setting, ...]
    sides: tuple[OneSided, ...] = ()
    layers: tuple[LayerCost, ...] = ()
    best: str = ""
    budget: int | None = None
    seconds: float = 0.0
    made_at: float = 0.0
    warnings: tuple[str, ...] = field(default=())

    @property
    def enough(self) -> int:
        """Tokens that would say enough, or as many as the model takes."""
        return min(ENOUGH, self.context)

    def setting(self, name: str) -> Setting | None:
        return next((item for item in self.settings if item.name == name), None)


def dumps(found: Calibration) -> str:
    return json.dumps({"version": VERSION, **asdict(found)}, indent=1) + "\n"


def loads(text: str) -> Calibration:
    """Raises ValueError for what is no result of this version."""
    try:
        raw = json.loads(text)
        if raw["version"] != VERSION:
            raise ValueError(f"version {raw['version']}, not {VERSION}")
        settings = tuple(_setting(item) for item in raw["settings"])
        sides = tuple(OneSided(item["side"], item["bits"], _build(Quality, item["quality"])) for item in raw["sides"])
        layers = tuple(_build(LayerCost, item) for item in raw["layers"])
        fixed = {"gate": _build(Gate, raw["gate"]), "settings": settings, "sides": sides, "layers": layers}
        return _build(Calibration, {**raw, **fixed, "warnings": tuple(raw["warnings"])})
    except (KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"not a calibration: {type(problem).__name__} {problem}") from None


def save(folder: Path, found: Calibration) -> Path:
    """Into the model's folder under the home, whole or not at all."""
    path = folder / FILE
    write_text(path, dumps(found))
    return path


def stored(folder: Path) -> Calibration | None:
    """The result kept with a model; None where there is none. Raises ValueError for a damaged one."""
    try:
        return loads((folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise ValueError(problem.strerror or str(problem)) from None


def _setting(raw: dict[str, Any]) -> Setting:
    pairs = {name: (raw[name][0], raw[name][1]) for name in ("needles", "facts", "answers_equal")}
    return _build(Setting, {**raw, **pairs, "quality": _build(Quality, raw["quality"])})


def _build(kind: type[T], raw: dict[str, Any]) -> T:
    return kind(**{item.name: raw[item.name] for item in fields(kind)})  # type: ignore[arg-type]
