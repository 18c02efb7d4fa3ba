"""The prefix index of the memory tier: chain -> entry, and for every parent its children in token order. Pure.

Exact: the longest common prefix among any number of siblings is shared by a neighbour of the asked key in sorted order.
Invariant: no partial child's tokens are a prefix of a sibling's; the longer one supersedes it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from kvd.cache.chain import Chain, next_chain, ordered_bytes
from kvd.cache.results import Match


@dataclass(slots=True, eq=False)
class Entry:
    """A known block. `block` is its place in the pool and follows it when it moves; None once it is gone."""

    block: int | None
    namespace: bytes
    chain: Chain
    parent: Chain
    tokens: tuple[int, ...]
    start: int
    full: bool
    key: bytes
    """tokens as ordered bytes"""

    def __lt__(self, other: Entry) -> bool:
        return self.key < other.key


def make_entry(
    block: int, namespace: bytes, parent: Chain, tokens: Sequence[int], start: int, block_size: int
) -> Entry:
    chain, key, full = next_chain(parent, tokens), ordered_bytes(tokens), len(tokens) == block_size
    return Entry(block, namespace, chain, parent, tuple(tokens), start, full, key)


class PrefixIndex:
    """Every lookup starts at a namespace, which is the first parent: namespaces share nothing."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._by_chain: dict[Chain, Entry] = {}
        self._children: dict[Chain, list[Entry]] = {}

    def __len__(self) -> int:
        return len(self._by_chain)

    def get(self, chain: bytes) -> Entry | None:
        return self._by_chain.get(Chain(chain))

    def children(self, chain: bytes) -> Sequence[Entry]:
        """Entries that follow a block, in token order."""
        return tuple(self._children.get(Chain(chain), ()))

    def below(self, chain: bytes) -> list[bytes]:
        """Chains of everything known behind a block."""
        found: list[bytes] = []
        parents = [Chain(chain)]
        while parents:
            children = [entry.chain for entry in self._children.get(parents.pop(), ())]
            found += children
            parents += children
        return found

    def add(self, entry: Entry) -> tuple[bool, Entry | None]:
        """Returns (added, superseded). Not added where a known sibling already holds all of its tokens."""
        siblings = self._children.setdefault(entry.parent, [])
        at = bisect_left(siblings, entry)
        if at < len(siblings) and siblings[at].key.startswith(entry.key):
            return False, None
        superseded = None
        if at > 0 and entry.key.startswith(siblings[at - 1].key):
            superseded = siblings[at - 1]
            self.remove(superseded)
            siblings = self._children.setdefault(entry.parent, [])
        insort(siblings, entry)
        self._by_chain[entry.chain] = entry
        return True, superseded

    def remove(self, entry: Entry) -> None:
        """Forget it. The caller owns `entry.block`."""
        del self._by_chain[entry.chain]
        siblings = self._children[entry.parent]
        at = bisect_left(siblings, entry)
        assert siblings[at] is entry
        del siblings[at]
        if not siblings:
            del self._children[entry.parent]

    def match(self, namespace: bytes, tokens: Sequence[int]) -> Match:
        """Full blocks by chain, then the child with the longest common token prefix."""
        size = self.block_size
        found: list[Entry] = []
        parent = Chain(namespace)
        while (len(found) + 1) * size <= len(tokens):
            part = tokens[len(found) * size : (len(found) + 1) * size]
            entry = self._by_chain.get(next_chain(parent, part))
            if entry is None:
                break
            found.append(entry)
            parent = entry.chain
        rows = len(found) * size
        child, common = self.best_child(parent, tokens[rows : rows + size])
        stored = child.tokens[common] if child is not None and common < len(child.tokens) else None
        if rows + common >= len(tokens):
            stored = None
        return Match(namespace, size, rows + common, tuple(found), child if common else None, stored)

    def best_child(self, parent: bytes, tokens: Sequence[int]) -> tuple[Entry | None, int]:
        """The child of `parent` that shares most leading tokens with `tokens`, and how many.

        With nothing in common it is still a neighbour (count 0): the place where the prompt diverges.
        """
        siblings = self._children.get(Chain(parent))
        if not siblings:
            return None, 0
        key = ordered_bytes(tokens)
        at = bisect_left(siblings, key, key=lambda entry: entry.key)
        best, most = None, -1
        for entry in siblings[max(0, at - 1) : at + 1]:
            common = _common_tokens(entry.key, key)
            if common > most:
                best, most = entry, common
        return best, max(most, 0)


def _common_tokens(left: bytes, right: bytes) -> int:
    """Leading tokens (4 bytes each) in common, by bisection: slices compare at memory speed."""
    low, high = 0, min(len(left), len(right)) // 4
    if left[: high * 4] == right[: high * 4]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if left[low * 4 : middle * 4] == right[low * 4 : middle * 4]:
            low = middle
        else:
            high = middle
    return low
