"""Sizes and durations as people write them ("8 GiB", "7d") and read them. Pure; raises ValueError."""

from __future__ import annotations

import re

_SIZES = {
    "": 1, "b": 1,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_DURATIONS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def _scaled(text: str, units: dict[str, float], what: str, example: str) -> float:
    match = _NUMBER.fullmatch(text)
    factor = units.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"not {what}: {text!r} (write it like {example})")
    return float(match[1]) * factor


def parse_size(text: str) -> int:
    """Bytes. "8 GiB" and "8G" are binary, "8 GB" is decimal, a bare number is bytes."""
    return int(_scaled(text, {unit: float(factor) for unit, factor in _SIZES.items()}, "a size", '"8 GiB", "500 MB"'))


def with_unit(text: str) -> str:
    """What a bare number that is too few bytes was meant to be: "8" -> "8GB", "4096" -> "4096MB", else ""."""
    count = int(text) if re.fullmatch(r"\s*[0-9]+\s*", text) else 0
    return f"{count}GB" if 0 < count < 1024 else f"{count}MB" if 0 < count < 1024**2 else ""


def parse_duration(text: str) -> float:
    """Seconds. "250ms", "30s", "15m", "2h", "7d"; a bare number is seconds."""
    return _scaled(text, _DURATIONS, "a duration", '"30s", "15m", "7d"')


def format_size(count: float) -> str:
    """Binary units, three significant digits, from 1000 on four: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{_short(count)} {unit}"
        count /= 1024
    return f"{_short(count)} TiB"


def _short(count: float) -> str:
    return f"{count:.0f}" if count == int(count) or abs(count) >= 999.5 else f"{count:.3g}"


def format_duration(seconds: float) -> str:
    """The largest unit that divides it, else one decimal: 1800 -> "30m", 0.25 -> "250ms"."""
    if 0 < seconds < 1:
        return f"{seconds * 1000:g}ms"
    for unit in ("w", "d", "h", "m"):
        if seconds >= _DURATIONS[unit] and seconds % _DURATIONS[unit] == 0 and unit != "w":
            return f"{seconds / _DURATIONS[unit]:g}{unit}"
    return f"{seconds:g}s"


def format_age(seconds: float) -> str:
    """A rough age for people: "12s", "3m", "5h", "2d"."""
    for unit, name, half in ((86400, "d", 1800), (3600, "h", 30), (60, "m", 0.5)):
        if seconds >= unit - half:  # else it would round to "60m"
            return f"{seconds / unit:.0f}{name}"
    return f"{max(0.0, seconds):.0f}s"
