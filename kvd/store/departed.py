"""Blocks that were stored and are not any more, until the front has told the workers. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

MOST: Final = 1 << 17
"""blocks that are named; of more than that it is only said that nothing is known to be stored"""


@dataclass(frozen=True, slots=True)
class Departure:
    """Blocks of one namespace that left, with the parents they had; `namespace` None: all that was ever stored."""

    namespace: bytes | None
    chains: tuple[bytes, ...] = ()
    parents: tuple[bytes, ...] = ()


EVERYTHING: Final = Departure(None)


class Departures:
    """What left since it was last told. Bounded: of more than MOST blocks no names are kept."""

    def __init__(self) -> None:
        self._left: defaultdict[bytes, dict[bytes, bytes]] = defaultdict(dict)
        self._count = 0
        self._everything = False

    def add(self, namespace: bytes, chain: bytes, parent: bytes) -> None:
        """A block left. One of which only the name is known is its own parent: its siblings are not known."""
        if self._everything:
            return
        self._left[namespace][chain] = parent
        self._count += 1
        if self._count > MOST:
            self.all()

    def all(self) -> None:
        """Nothing is known to be stored."""
        self._left.clear()
        self._everything = True

    def take(self) -> tuple[Departure, ...]:
        """What left since the last call."""
        left, self._left = self._left, defaultdict(dict)
        everything, self._everything = self._everything, False
        self._count = 0
        if everything:
            return (EVERYTHING,)
        return tuple(Departure(n, tuple(of), tuple(dict.fromkeys(of.values()))) for n, of in left.items())
