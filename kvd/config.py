"""Configuration, resolved: the table of `kvd.settings` filled from flags, the file and defaults, in that order.

The home folder and the socket come from `--home`, KVD_HOME and KVD_SOCKET.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvclient.errors import BadRequest
from kvd.home import Home
from kvd.settings import SECTIONS, Cache, Daemon, Gateway, Memory, Models, Setting, Store, Warm, settings
from kvd.units import format_size, with_unit

LEAST: dict[str, int] = {"memory.limit": 64 * 2**20, "store.limit": 2**20}
"""bytes that make sense; less is a unit left out. The store's 0 is no size, it says off."""


class Source(StrEnum):
    DEFAULT = "default"
    FILE = "file"
    ENV = "env"
    FLAG = "flag"


@dataclass(frozen=True, slots=True)
class Config:
    """Every setting, resolved. `sources` maps "section.key" (and "home", "socket") to where the value came from."""

    home: Path
    socket: Path
    file: Path
    daemon: Daemon = field(default_factory=Daemon)
    memory: Memory = field(default_factory=Memory)
    models: Models = field(default_factory=Models)
    store: Store = field(default_factory=Store)
    cache: Cache = field(default_factory=Cache)
    gateway: Gateway = field(default_factory=Gateway)
    warm: Warm = field(default_factory=Warm)
    sources: Mapping[str, Source] = field(default_factory=dict)

    @property
    def store_path(self) -> Path:
        return Home(self.home).store if self.store.path is None else self.home / self.store.path

    def value(self, setting: Setting) -> Any:
        return getattr(getattr(self, setting.section), setting.name)

    def source(self, path: str) -> Source:
        return self.sources.get(path, Source.DEFAULT)


def load(home: Path | None = None, file: Path | None = None, flags: Mapping[str, str] | None = None) -> Config:
    """Resolve the configuration. `flags` maps "section.key" to text as typed.

    A missing file is no error unless it was named. Raises BadRequest for an unreadable file, an unknown key (with the
    nearest known one) and a value that does not fit (with what would).
    """
    place = Home(home.expanduser().absolute()) if home else Home.default()
    path = file or place.config
    sources: dict[str, Source] = {}
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    known = {setting.path: setting for setting in settings()}
    for name, raw in _read(path, must_exist=file is not None).items():
        _take(values, sources, known, name, raw, Source.FILE, str(path))
    for name, text in (flags or {}).items():
        _take(values, sources, known, name, text, Source.FLAG, "command line")
    sources["home"] = Source.FLAG if home else Source.ENV if os.environ.get("KVD_HOME") else Source.DEFAULT
    sources["socket"] = Source.ENV if os.environ.get("KVD_SOCKET") else sources["home"]
    built: dict[str, Any] = {section: cls(**values[section]) for section, cls in SECTIONS.items()}
    return Config(home=place.root, socket=place.socket, file=path, sources=sources, **built)


def changes(old: Config, new: Config) -> tuple[list[str], list[str]]:
    """Keys that differ: those a reload applies, and those that need a restart."""
    changed = [setting for setting in settings() if old.value(setting) != new.value(setting)]
    return [s.path for s in changed if s.key.live], [s.path for s in changed if not s.key.live]


def _read(path: Path, must_exist: bool) -> dict[str, Any]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # Windows' editors begin it with a mark
    except FileNotFoundError:
        if must_exist:
            raise BadRequest(f"no such config file: {path}", path=str(path)) from None
        return {}
    except UnicodeDecodeError as problem:
        raise BadRequest(f"config file {path}: byte {problem.start} is not UTF-8", path=str(path)) from None
    except (OSError, tomllib.TOMLDecodeError) as problem:
        raise BadRequest(f"config file {path}: {problem}", path=str(path)) from None
    found = {}
    for section, table in tables.items():
        if not isinstance(table, dict):
            raise BadRequest(f"config file {path}: {section} stands outside a section{_hint(section)}", key=section)
        if section not in SECTIONS:
            near = _nearest(section, list(SECTIONS))
            raise BadRequest(f"config file {path}: unknown section [{section}]{near}", key=section)
        found.update({f"{section}.{name}": value for name, value in table.items()})
    return found


def _take(
    values: dict[str, dict[str, Any]], sources: dict[str, Source], known: Mapping[str, Setting],
    name: str, raw: Any, source: Source, where: str,
) -> None:  # fmt: skip
    setting = known.get(name)
    if setting is None:
        raise BadRequest(f"{where}: unknown key {name}{_nearest(name, list(known))}", key=name)
    try:
        value = setting.key.kind.parse(raw)
        _check_least(name, raw, value)
    except ValueError as problem:
        raise BadRequest(f"{where}: {name}: {problem}", key=name) from None
    values[setting.section][setting.name] = value
    sources[name] = source


def _check_least(name: str, raw: Any, value: Any) -> None:
    least = LEAST.get(name)
    if least is None or value is None or value >= least or (name, value) == ("store.limit", 0):
        return
    if meant := with_unit(str(raw)):
        raise ValueError(f"{value} bytes; did you mean {meant}? The least is {format_size(least)}")
    raise ValueError(f"{raw} is less than the least, {format_size(least)}")


def _nearest(name: str, known: list[str]) -> str:
    same = [key for key in known if key.endswith("." + name.rpartition(".")[2])]
    near = same or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def _hint(name: str) -> str:
    homes = [setting.section for setting in settings() if setting.name == name]
    return f"; write it under [{homes[0]}]" if homes else ""
