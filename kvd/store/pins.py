"""Pins: blocks that may not be evicted, with the path from them to the root, for ever or until a time.

They live in `pins.json`, replaced as a whole, so that a lost index loses no pin. A pin whose block was damaged or lost
stays: the block may come back. One whose block had to go for the limit holds what is left of its path.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from kvd.store.files import Files, read_whole, replace_whole

_LIMIT = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Pin:
    """`chain` is the deepest pinned block; `expires` in seconds since the epoch, None: never."""

    namespace: bytes
    chain: bytes
    expires: float | None
    created: float


class Pins:
    """By chain, one pin each. Memory never holds what the file does not say: a change that cannot be written is not
    made."""

    def __init__(self, files: Files, path: str, durable: bool) -> None:
        self._files = files
        self._path = path
        self._durable = durable
        self._pins: dict[bytes, Pin] = {}

    def load(self) -> None:
        """Raises OSError; ValueError for a file that is not ours."""
        try:
            text = read_whole(self._files, self._path, _LIMIT)
        except FileNotFoundError:
            return
        try:
            for item in json.loads(text)["pins"]:
                pin = Pin(
                    bytes.fromhex(item["namespace"]), bytes.fromhex(item["chain"]), item["expires"], item["created"]
                )
                self._pins[pin.chain] = pin
        except (KeyError, TypeError) as problem:
            raise ValueError(f"{self._path}: {problem!r}") from None

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def __len__(self) -> int:
        return len(self._pins)

    def get(self, chain: bytes) -> Pin | None:
        return self._pins.get(chain)

    def held(self, now: float) -> set[bytes]:
        """Chains that must stay; their ancestors stay with them since eviction is leaf-first."""
        return {p.chain for p in self._pins.values() if p.expires is None or p.expires > now}

    def add(self, pin: Pin) -> None:
        """Durable on return. Raises OSError; the pin is then not set."""
        self._replace({**self._pins, pin.chain: pin})

    def remove(self, chain: bytes) -> bool:
        """Durable on return; False if there was none. Raises OSError."""
        if chain not in self._pins:
            return False
        self._replace({c: p for c, p in self._pins.items() if c != chain})
        return True

    def move(self, chain: bytes, to: bytes) -> None:
        """The pinned block was superseded by a longer one. Raises OSError."""
        if old := self._pins.get(chain):
            rest = {c: p for c, p in self._pins.items() if c != chain}
            self._replace({**rest, to: Pin(old.namespace, to, old.expires, old.created)})

    def retreat(self, left: Mapping[bytes, bytes]) -> int:
        """Blocks `left` (chain -> parent): their pins hold the last block before them, the longer one of two that meet
        there. Returns how many pins have nothing left to hold and are forgotten. Raises OSError."""
        kept: dict[bytes, Pin] = {}
        lost = 0
        for pin in sorted(self._pins.values(), key=lambda p: math.inf if p.expires is None else p.expires):
            chain = pin.chain
            while chain in left:
                chain = left[chain]
            if chain != pin.namespace:
                kept[chain] = replace(pin, chain=chain)
            else:
                lost += 1
        if kept != self._pins:
            self._replace(kept)
        return lost

    def expire(self, now: float) -> int:
        """Forget pins whose time is over; returns how many. Raises OSError."""
        held = self.held(now)
        if gone := len(self._pins) - len(held):
            self._replace({c: p for c, p in self._pins.items() if c in held})
        return gone

    def clear(self, only: Collection[bytes] = ()) -> None:
        """Forget all pins, or those of some namespaces. Raises OSError."""
        kept = {c: p for c, p in self._pins.items() if only and p.namespace not in only}
        if len(kept) != len(self._pins):
            self._replace(kept)

    def _replace(self, pins: dict[bytes, Pin]) -> None:
        items = [
            {"namespace": p.namespace.hex(), "chain": p.chain.hex(), "expires": p.expires, "created": p.created}
            for p in pins.values()
        ]
        text = json.dumps({"version": 1, "pins": items}, indent=1).encode()
        replace_whole(self._files, self._path, text, self._durable)
        self._pins = pins
