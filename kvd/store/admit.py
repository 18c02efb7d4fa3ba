"""Deferred admission: which prefixes were seen before. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

REMEMBERED: Final = 1 << 16
"""chains; the oldest are forgotten first"""


class Sightings:
    """A bounded memory of chains that were offered."""

    def __init__(self, size: int = REMEMBERED) -> None:
        self._size = size
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def again(self, chain: bytes) -> bool:
        """True if the chain was offered before."""
        if chain in self._seen:
            self._seen.move_to_end(chain)
            return True
        self._seen[chain] = None
        if len(self._seen) > self._size:
            self._seen.popitem(last=False)
        return False
