"""`kvd.json`: what the daemon knows about a model it brought in, and the folder of models under the home.

    $KVD_HOME/models/<name>/kvd.json     with the weights beside it, or {"path": DIR} for a folder used where it is

Standard library only: the front reads records.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kvclient.errors import BadRequest, UnknownModel, UnsupportedModel
from kvd.atomic import write_text

FILE = "kvd.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Record:
    """One model. `path` is the absolute folder of its files when they are not beside the record."""

    name: str
    source: str
    pulled_at: float
    """seconds since the epoch"""
    fingerprint: str = ""
    path: str | None = None


def checked_name(name: str) -> str:
    """The name itself. Raises BadRequest unless it is 1 to 64 letters, digits, dots, dashes and underscores."""
    if not _NAME.fullmatch(name):
        allowed = "up to 64 letters, digits, '.', '-' and '_', starting with a letter or digit"
        raise BadRequest(f"not a model name: {name!r}; use {allowed}", name=name)
    return name


def write_record(folder: Path, record: Record) -> None:
    """Write `folder/kvd.json`, durably and whole or not at all."""
    write_text(folder / FILE, json.dumps(asdict(record), indent=1))


def read_record(folder: Path) -> Record:
    """Raises UnsupportedModel when the file is damaged; unknown keys are left out (a newer kvd wrote them)."""
    path = folder / FILE
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Record(**{field.name: content[field.name] for field in fields(Record) if field.name in content})
    except (OSError, ValueError, TypeError) as error:
        raise UnsupportedModel(f"{path} cannot be read ({error})", file=str(path), reason="damaged record") from error


def names(home: Path) -> list[str]:
    """Models under `home`, sorted, with those whose record cannot be read. Raises BadRequest when the folder cannot."""
    folder = home / "models"
    try:
        entries = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as problem:
        raise BadRequest(f"cannot read {folder}: {problem.strerror}", path=str(folder)) from None
    return sorted(entry.name for entry in entries if _NAME.fullmatch(entry.name) and _recorded(entry))


def _recorded(folder: Path) -> bool:
    try:
        return stat.S_ISREG((folder / FILE).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # who reads it is told why


def _spelt(folder: Path) -> bool:
    """Whether this is the folder's own name: macOS finds `demo` as `Demo` too, and would load it a second time."""
    try:
        return folder.name in os.listdir(folder.parent)
    except OSError:
        return True  # it has been found all the same


def unknown(name: str, known: Sequence[str]) -> UnknownModel:
    """For a name that is none of `known`."""
    hint = f"known: {', '.join(known)}" if known else "none is here yet; try: kvd pull demo"
    return UnknownModel(f"no model named {name!r} ({hint})", model=name, known=list(known))


def find(home: Path, name: str) -> tuple[Record, Path]:
    """The record of `name` and the folder that holds its files. Raises UnknownModel with the known names, and
    UnsupportedModel when the files are gone."""
    folder = home / "models" / name
    if not _NAME.fullmatch(name) or not _recorded(folder) or not _spelt(folder):
        raise unknown(name, names(home))
    record = read_record(folder)
    files = Path(record.path) if record.path else folder
    try:
        there = (files / "config.json").is_file()
    except OSError as problem:
        said = f"the files of model {name} in {files} cannot be read ({problem.strerror})"
        raise UnsupportedModel(said, file=str(files), reason="unreadable") from None
    if not there:
        raise UnsupportedModel(f"the files of model {name} are gone from {files}", file=str(files), reason="missing")
    return record, files
