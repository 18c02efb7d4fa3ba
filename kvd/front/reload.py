"""Reading the configuration again while the daemon runs."""

from __future__ import annotations

import dataclasses
from typing import Literal

from kvd.config import Config, Source, changes, load
from kvd.settings import SECTIONS, settings
from kvd.store.base import Limits


def limits(config: Config) -> Limits:
    """The store's share of the configuration."""
    store = config.store
    admission: Literal["first", "second"] = "second" if store.admission == "second" else "first"
    return Limits(store.limit, store.free_space, store.durable, admission, store.quota, store.tbw)


def reloaded(old: Config) -> tuple[Config, list[str], list[str]]:
    """The configuration to go on with, the keys that were applied, and those that changed but wait for a restart.

    Flags keep their values. Raises BadRequest for a file that does not fit; nothing changes then.
    """
    flags = {s.path: s.key.kind.show(old.value(s)) for s in settings() if old.source(s.path) is Source.FLAG}
    new = load(old.home, old.file if old.file.exists() else None, flags)
    applied, restart = changes(old, new)
    sections = {}
    for name in SECTIONS:
        live = [s for s in settings() if s.section == name and s.key.live]
        sections[name] = dataclasses.replace(getattr(old, name), **{s.name: new.value(s) for s in live})
    sources = {**old.sources, **{path: new.source(path) for path in applied}}
    return dataclasses.replace(old, sources=sources, **sections), applied, restart
