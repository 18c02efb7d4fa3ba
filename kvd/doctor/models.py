"""Checks of the models that are here: are their files whole, and will they fit the memory limit?"""

from __future__ import annotations

from kvclient.errors import KvdError
from kvd import machine
from kvd.config import Config
from kvd.doctor.finding import Finding, fail, ok, warn
from kvd.front.registry import needs
from kvd.home import Home
from kvd.models import record
from kvd.models.backend import Backend, expected
from kvd.units import format_size


def models(config: Config, backend: Backend | None = None) -> list[Finding]:
    """One finding per model, told from the headers of its files, and one per alias of none; nothing is loaded."""
    home = Home(config.home)
    names = record.names(home.root)
    if not names:
        return [ok("models", "none yet; `kvd pull demo` brings a small one")]
    budget = machine.budget(config.memory.limit, machine.memory())
    fitting = [_fits(home, name, config.cache.block_size, backend or expected(), budget) for name in names]
    return fitting + [_lost(alias, model) for alias, model in config.models.aliases if model not in names]


def _lost(alias: str, model: str) -> Finding:
    fix = f"pull one under that name (kvd pull … --name {model}), or change models.aliases in kvd.toml"
    return warn(f"alias {alias}", f"there is no model {model!r}", fix)


def _fits(home: Home, name: str, block_size: int, backend: Backend, budget: int) -> Finding:
    title = f"model {name}"
    try:
        _, folder = record.find(home.root, name)
        wanted = needs(folder, block_size)
    except KvdError as problem:
        return fail(title, problem.message, f"pull it again (kvd pull … --name {name} --force), or delete its folder")
    weights = wanted.weights(backend, budget)
    detail = f"{format_size(weights)} of weights, {format_size(budget)} for all models"
    if weights + wanted.pool > budget:
        return fail(title, detail, f"raise memory.limit to {format_size(weights + wanted.pool)} or more")
    if backend == "cpu" and weights != wanted.dense:
        detail += ": kept as stored, since float32 does not fit; prefill is about 20 times slower so"
        return warn(title, detail, f"raise memory.limit to {format_size(wanted.dense + wanted.pool)} or more")
    return ok(title, detail)
