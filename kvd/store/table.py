"""Every stored block in the owner's memory: what lookups, the ledger and eviction need. Pure bookkeeping.

Invariants: `children[p]` holds exactly the chains whose parent is p; `bytes` and `tokens` are the sums over all slots.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class Slot:
    """One committed shard. `tokens` is a count, `size` of the file, `disk` what it takes there (bytes), times in
    seconds; `mtime` is what the file says, `used` may be newer."""

    namespace: bytes
    chain: bytes
    parent: bytes
    checksum: bytes
    tokens: int
    start: int
    size: int
    disk: int
    hits: int
    used: float
    mtime: float
    preview: str
    """the first words of its text, at most `preview.PREVIEW` characters"""


class Table:
    """Slots by chain, and what is derived from them."""

    def __init__(self) -> None:
        self.slots: dict[bytes, Slot] = {}
        self.children: dict[bytes, set[bytes]] = {}
        self.bytes = 0
        self.tokens = 0
        self.by_namespace: dict[bytes, int] = defaultdict(int)

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots.values())

    def get(self, namespace: bytes, chain: bytes) -> Slot | None:
        slot = self.slots.get(chain)
        return slot if slot is not None and slot.namespace == namespace else None

    def add(self, slot: Slot) -> None:
        """Raises KeyError if the chain is there already."""
        if slot.chain in self.slots:
            raise KeyError(slot.chain.hex())
        self.slots[slot.chain] = slot
        self.children.setdefault(slot.parent, set()).add(slot.chain)
        self.bytes += slot.disk
        self.tokens += slot.tokens
        self.by_namespace[slot.namespace] += slot.disk

    def remove(self, chain: bytes) -> Slot:
        slot = self.slots.pop(chain)
        siblings = self.children[slot.parent]
        siblings.discard(chain)
        if not siblings:
            del self.children[slot.parent]
        self.bytes -= slot.disk
        self.tokens -= slot.tokens
        self.by_namespace[slot.namespace] -= slot.disk
        if not self.by_namespace[slot.namespace]:
            del self.by_namespace[slot.namespace]
        return slot

    def path(self, chain: bytes) -> list[Slot]:
        """The block and all its stored ancestors, root last."""
        found = []
        slot = self.slots.get(chain)
        while slot is not None:
            found.append(slot)
            slot = self.slots.get(slot.parent)
        return found

    def strays(self) -> set[bytes]:
        """Chains that no lookup from the root can reach, since an ancestor is missing."""
        lost = [s.chain for s in self if s.parent != s.namespace and s.parent not in self.slots]
        return set(self.below(lost)) if lost else set()

    def below(self, chains: Iterable[bytes]) -> list[bytes]:
        """The given chains and all their descendants, parents before children."""
        found = list(dict.fromkeys(chains))
        for chain in found:
            found.extend(self.children.get(chain, ()))
        return list(dict.fromkeys(found))
