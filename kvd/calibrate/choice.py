"""Which precision a load takes, and what is to be said about it: `auto`, and the gate. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvd.calibrate.result import NATIVE, Calibration, Quality, stored

AUTO: Final = "auto"


@dataclass(frozen=True, slots=True)
class Choice:
    """`text` is what `kvd.cache.precision.parse` takes; `warnings` are for people."""

    text: str
    warnings: tuple[str, ...] = ()


def choose(asked: str, folder: Path, name: str, identity: str) -> Choice:
    """`auto` becomes the best table that passed on these very weights, else native. Any other precision is taken as it
    was asked for, with a warning where it has not passed its gate.

    folder: the model's folder under the home. identity: of its files as they are now.
    """
    if asked == NATIVE:
        return Choice(NATIVE)
    hint = f"`kvd calibrate {name}` measures it"
    try:
        found = stored(folder)
    except ValueError as problem:
        found, hint = None, f"its calibration cannot be read ({problem}); `kvd calibrate {name}` makes it anew"
    if found is not None and found.identity != identity:
        found, hint = None, f"its calibration is of other weights; `kvd calibrate {name}` measures these"
    if asked == AUTO:
        return _automatic(found, name, hint)
    measured = found.setting(asked) if found is not None else None
    if found is None or measured is None:
        return Choice(asked, (f"KV precision {asked} has not been measured on {name}: {hint}",))
    if not measured.quality.passes(found.gate):
        return Choice(asked, (f"KV precision {asked} did not pass on {name}: {_numbers(measured.quality, found)}",))
    return Choice(asked, _short(found))


def _automatic(found: Calibration | None, name: str, hint: str) -> Choice:
    if found is None:
        return Choice(NATIVE, (f"KV precision auto is native: nothing was measured on {name}; {hint}",))
    if not found.best:
        within = "" if found.budget is None else f" within {found.budget:,} bytes per token"
        return Choice(NATIVE, (f"KV precision auto is native: nothing{within} passed on {name} ({_limits(found)})",))
    return Choice(found.best, _short(found))


def _numbers(quality: Quality, found: Calibration) -> str:
    return f"mean KLD {quality.kld_mean:.3g}, same top token {quality.same_top:.1%} ({_limits(found)})"


def _limits(found: Calibration) -> str:
    gate = found.gate
    return f"needed over {found.tokens:,} tokens: KLD <= {gate.max_kld:g}, same top token >= {gate.min_same_top:.0%}"


def _short(found: Calibration) -> tuple[str, ...]:
    if found.tokens >= found.enough:
        return ()
    return (f"measured behind {found.tokens:,} tokens only; {found.enough:,} would say more",)
