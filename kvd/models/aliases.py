"""Further names of models, as `models.aliases` gives them: pairs of a name, which may hold `*`, and a model. Pure; the
registry is the one that resolves names."""

from __future__ import annotations

from collections.abc import Container, Iterable
from fnmatch import fnmatchcase

Alias = tuple[str, str]


def match(name: str, aliases: Iterable[Alias]) -> Alias | None:
    """The alias that holds for `name`: the same text before a pattern, of patterns the longest (of equally long ones
    the first)."""
    fitting = [alias for alias in aliases if fits(name, alias[0])]
    return max(fitting, key=lambda alias: (alias[0] == name, len(alias[0])), default=None)


def fits(name: str, pattern: str) -> bool:
    """As `fnmatch` does it, but only `*` is special."""
    plain = pattern.replace("[", "[[]").replace("?", "[?]")
    return fnmatchcase(name, plain)


def by_model(aliases: Iterable[Alias], here: Container[str]) -> dict[str, list[str]]:
    """Names and patterns by the model they lead to; without those that are the name of a model that is `here`."""
    found: dict[str, list[str]] = {}
    for name, model in aliases:
        if name not in here:
            found.setdefault(model, []).append(name)
    return found
