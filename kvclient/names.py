"""Names of models for completion, from the home alone. Every Tab runs this: no daemon is asked, little is imported."""

from __future__ import annotations

import os
import re
from typing import Final

from kvclient import paths
from kvclient.configured import section

ASKED: Final = ("models", "names")
"""what a script asks of `--completion`: the models that are here, or these and their aliases"""
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]*")
"""What a shell takes as it stands: bash expands the words it is given to complete."""


def listing(asked: str) -> str:
    """A line for each, without patterns: what they stand for is anybody's guess."""
    home = paths.home()
    try:
        found = set(os.listdir(home / "models"))
    except OSError:
        found = set()
    if asked == "names" and isinstance(aliases := section(home, "models").get("aliases"), dict):
        found.update(aliases)
    return "".join(f"{name}\n" for name in sorted(found) if _PLAIN.fullmatch(name))
