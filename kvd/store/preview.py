"""Previews of blocks: the first words of their text, by which people know them. Pure."""

from __future__ import annotations

import re
from typing import Final

PREVIEW: Final = 80
"""characters that the index keeps; the shard has more"""
_TAGS: Final = re.compile(r"<\|[^<>|]*\|>")
"""of chat templates: they tell nobody anything"""


def plain(text: str) -> str:
    """A text on one line, without the template's tags."""
    return " ".join(_TAGS.sub(" ", text).split())
