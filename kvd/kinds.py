"""Kinds of configuration values: how each is read (from TOML or a flag's text), checked and shown."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvclient.errors import BadRequest
from kvclient.fields import MAX_MODEL
from kvd.cache.precision import table_of
from kvd.models.record import checked_name
from kvd.units import format_duration, format_size, parse_duration, parse_size

_ALIAS = re.compile(rf"[^\s=;]{{1,{MAX_MODEL}}}")


@dataclass(frozen=True, slots=True)
class WarmPrompt:
    """A prefix to prefill at start: what `kv` would send for this file as stdin, up to where the question starts."""

    model: str
    file: Path
    system: str | None = None
    raw: bool = False


@dataclass(frozen=True, slots=True)
class Kind:
    """`parse` takes a TOML value or text and raises ValueError; `show` gives text that `parse` takes back."""

    name: str
    parse: Callable[[Any], Any]
    show: Callable[[Any], str]


def choice(*words: str) -> Kind:
    def parse(raw: Any) -> str:
        if raw not in words:
            raise ValueError(f"{raw!r} is not one of {', '.join(words)}")
        return str(raw)

    return Kind(" | ".join(words), parse, str)


def _bool(raw: Any) -> bool:
    found = {True: True, False: False, "true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}
    if not isinstance(raw, bool | str) or raw not in found:
        raise ValueError(f"{raw!r} is neither true nor false")
    return found[raw]


def _text(raw: Any) -> str:
    if not isinstance(raw, str):
        raise ValueError(f"{raw!r} is not text")
    return raw


def _int(raw: Any, low: int, high: int) -> int:
    try:
        number = int(raw) if isinstance(raw, str) else raw
    except ValueError:
        raise ValueError(f"{raw!r} is not a whole number") from None
    if not isinstance(number, int) or isinstance(number, bool):
        raise ValueError(f"{raw!r} is not a whole number")
    if not low <= number <= high:
        raise ValueError(f"{number} is outside {low} to {high}")
    return number


def _size(raw: Any) -> int:
    return _int(raw, 0, 2**62) if isinstance(raw, int) else parse_size(_text(raw))


def _duration(raw: Any) -> float:
    if isinstance(raw, int | float) and not isinstance(raw, bool) and raw >= 0:
        return float(raw)
    return parse_duration(_text(raw))


def _power_of_two(raw: Any) -> int:
    number = _int(raw, 16, 4096)
    if number & (number - 1):
        raise ValueError(f"{number} is not a power of two")
    return number


def _chunk(raw: Any) -> int:
    number = _int(raw, 64, 65536)
    if number % 64:
        raise ValueError(f"{number} is not a multiple of 64")
    return number


def _path(raw: Any) -> Path:
    return Path(_text(raw)).expanduser()


def _or(word: str, parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda raw: None if raw == word else parse(raw)


def _show_or(word: str, show: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: word if value is None else show(value)


def _prompt(raw: Any) -> WarmPrompt:
    if isinstance(raw, str):
        model, equals, file = raw.partition("=")
        if not (model and equals and file):
            raise ValueError(f"{raw!r} is not MODEL=FILE")
        return WarmPrompt(model, _path(file))
    if not isinstance(raw, dict):
        raise ValueError(f"{raw!r} is neither a table nor MODEL=FILE")
    if unknown := sorted(set(raw) - {"model", "file", "system", "raw"}):
        raise ValueError(f"unknown field {unknown[0]!r} (known: model, file, system, raw)")
    if missing := [name for name in ("model", "file") if name not in raw]:
        raise ValueError(f"{missing[0]!r} is missing in {raw!r}")
    system = raw.get("system")
    return WarmPrompt(
        _text(raw["model"]), _path(raw["file"]), None if system is None else _text(system), _bool(raw.get("raw", False))
    )


def _prompts(raw: Any) -> tuple[WarmPrompt, ...]:
    items = [part for part in raw.split(",") if part] if isinstance(raw, str) else raw
    if not isinstance(items, list):
        raise ValueError(f"{raw!r} is not a list")
    return tuple(_prompt(item) for item in items)


def _float(raw: Any, low: float, high: float) -> float:
    try:
        number = float(raw) if isinstance(raw, str) else raw
    except ValueError:
        raise ValueError(f"{raw!r} is not a number") from None
    if not isinstance(number, int | float) or isinstance(number, bool) or not low <= number <= high:
        raise ValueError(f"{raw!r} is not a number from {low:g} to {high:g}")
    return float(number)


def _pairs(raw: Any, of: str) -> dict[str, Any]:
    """A table, or text like NAME=VALUE; NAME=VALUE."""
    if isinstance(raw, str):
        raw = dict(part.strip().partition("=")[::2] for part in raw.split(";") if part.strip())
    if not isinstance(raw, dict):
        raise ValueError(f"{raw!r} is not a table of {of}")
    return raw


def _show_pairs(pairs: tuple[tuple[str, str], ...]) -> str:
    return "; ".join(f"{name}={value}" for name, value in pairs)


def _precisions(raw: Any) -> tuple[tuple[str, str], ...]:
    pairs = _pairs(raw, "models and their KV precisions")
    return tuple((str(model), _precision(text)) for model, text in pairs.items())


def _aliases(raw: Any) -> tuple[tuple[str, str], ...]:
    """Names as clients send them; whether the models are here is known when one is asked for."""
    pairs = _pairs(raw, "names and their models")
    return tuple((_alias(name), _model(model, name)) for name, model in pairs.items())


def _alias(name: str) -> str:
    if not _ALIAS.fullmatch(name):
        raise ValueError(f"{name!r} is no alias: up to {MAX_MODEL} characters, without spaces, = and ;")
    return name


def _model(raw: Any, alias: str) -> str:
    if isinstance(raw, dict):  # TOML has read gpt-4.1 as 1 in a table gpt-4
        raise ValueError(f"{alias} is a table: a name with a dot stands in quotes")
    try:
        return checked_name(_text(raw))
    except (BadRequest, ValueError) as problem:
        raise ValueError(f"{alias}: {problem}") from None


def _precision(raw: Any) -> str:
    """The text of a precision; whether a model takes it is known at load."""
    text = _text(raw)
    if text != "auto":
        try:
            table_of(text)
        except BadRequest as problem:
            raise ValueError(problem.message) from None
    return text


BOOL = Kind("true | false", _bool, lambda value: "true" if value else "false")
TEXT = Kind("text", _text, str)
PRECISION = Kind("precision", _precision, str)
PRECISIONS = Kind("table", _precisions, _show_pairs)
ALIASES = Kind("table", _aliases, _show_pairs)
POSITIVE = Kind("number", lambda raw: _float(raw, 0, 1e9), lambda value: f"{value:g}")
SHARE = Kind("share", lambda raw: _float(raw, 0, 1), lambda value: f"{value:g}")
COUNT = Kind("number", lambda raw: _int(raw, 1, 1_000_000), str)
PORT = Kind("port", lambda raw: _int(raw, 0, 65535), str)
SIZE = Kind("size", _size, format_size)
AUTO_SIZE = Kind("size | auto", _or("auto", _size), _show_or("auto", format_size))
DURATION = Kind("duration", _duration, format_duration)
TTL = Kind("duration | off", _or("off", _duration), _show_or("off", format_duration))
BLOCK = Kind("power of two", _power_of_two, str)
AUTO_CHUNK = Kind("number | auto", _or("auto", _chunk), _show_or("auto", str))
PATH = Kind("path | auto", _or("auto", _path), _show_or("auto", str))
PROMPTS = Kind("list", _prompts, lambda prompts: ", ".join(f"{item.model}={item.file}" for item in prompts))
