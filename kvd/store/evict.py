"""Who leaves first. Pure.

Leaves before their parents, so that what stays can always be reached. Among leaves: strays (unreachable) first, then
probation, then protected, each by last use. Probation is what was never reused after it was stored, and what has not
been reused for longest once reused blocks hold more than `PROTECTED` of the limit (segmented LRU). So a long scan,
whose blocks are seen once, cannot push out a prefix that is in use.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from typing import Final

from kvd.store.table import Slot

PROTECTED: Final = 0.8
"""share of the limit that reused blocks may hold safe from new ones"""
STRAY, PROBATION, REUSED = 0, 1, 2


def classes(slots: Iterable[Slot], strays: Collection[bytes], limit: int) -> dict[bytes, int]:
    """Class of every block: STRAY, PROBATION or REUSED."""
    found: dict[bytes, int] = {}
    reused = []
    for slot in slots:
        found[slot.chain] = STRAY if slot.chain in strays else PROBATION
        if slot.hits and slot.chain not in strays:
            reused.append(slot)
    room = int(limit * PROTECTED)
    for slot in sorted(reused, key=lambda s: -s.used):
        room -= slot.disk
        if room < 0:
            break
        found[slot.chain] = REUSED
    return found


def plan(
    slots: Collection[Slot], need: int, held: Collection[bytes], strays: Collection[bytes], limit: int
) -> list[Slot]:
    """Victims in order, children before parents, until `need` bytes are free or nothing more may go.

    held: chains that stay (pinned paths, parents of pending writes); their ancestors stay with them."""
    if need <= 0:
        return []
    rank = classes(slots, strays, limit)
    by_chain = {slot.chain: slot for slot in slots}
    open_children = dict.fromkeys(by_chain, 0)
    for slot in slots:
        if slot.parent in open_children:
            open_children[slot.parent] += 1

    def entry(slot: Slot) -> tuple[int, float, int, bytes]:
        return rank[slot.chain], slot.used, -slot.start, slot.chain

    heap = [entry(s) for s in slots if not open_children[s.chain] and s.chain not in held]
    heapq.heapify(heap)
    victims: list[Slot] = []
    while heap and need > 0:
        slot = by_chain[heapq.heappop(heap)[3]]
        victims.append(slot)
        need -= slot.disk
        if slot.parent in open_children:
            open_children[slot.parent] -= 1
            if not open_children[slot.parent] and slot.parent not in held:
                heapq.heappush(heap, entry(by_chain[slot.parent]))
    return victims
