"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    """works, but slower, smaller or less private than it could be"""
    FAIL = "fail"
    """does not work"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `fix` is empty exactly when the level is OK."""

    name: str
    level: Level
    detail: str
    fix: str = ""


def ok(name: str, detail: str) -> Finding:
    return Finding(name, Level.OK, detail)


def warn(name: str, detail: str, fix: str) -> Finding:
    return Finding(name, Level.WARN, detail, fix)


def fail(name: str, detail: str, fix: str) -> Finding:
    return Finding(name, Level.FAIL, detail, fix)
