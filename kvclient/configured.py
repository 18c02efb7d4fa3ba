"""What `kvd.toml` says, for the little that programs without the daemon's own reader need of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def section(home: Path, name: str) -> dict[str, Any]:
    """Empty where there is none, and for a file that cannot be read: the daemon is the one to complain about it."""
    try:
        text = (home / "kvd.toml").read_text()
    except (OSError, UnicodeDecodeError):
        return {}
    import tomllib

    try:
        found = tomllib.loads(text).get(name)
    except tomllib.TOMLDecodeError:
        return {}
    return found if isinstance(found, dict) else {}
