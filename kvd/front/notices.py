"""What happened to the store and its owner should know, said in the log once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvd.front.logs import logger


class Notices:
    def __init__(self) -> None:
        self._off = False
        self._trimmed: Mapping[str, int] = {}

    def say(self, stats: Mapping[str, Any]) -> None:
        """Compare the store's numbers with the last ones: it was switched off or on, or its limit took blocks."""
        off, path = bool(stats.get("off")), stats.get("path")
        if off != self._off:
            self._off = off
            left = stats.get("shards_bytes")
            logger.warning("store off" if off else "store on", path=path, bytes=left, clear="kvd cache clear")
        trimmed = stats.get("trimmed", {})
        if trimmed != self._trimmed:
            self._trimmed = trimmed
            if trimmed:
                logger.warning("store limit took blocks", path=path, limit=stats.get("limit"), **trimmed)
