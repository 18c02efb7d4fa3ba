"""What of a prompt is stored: blocks by their chains, then the child that shares most with what follows."""

from __future__ import annotations

from collections.abc import Sequence

from kvd.store.base import Entry, Found
from kvd.store.core import Core
from kvd.store.kv import IndexFailed
from kvd.store.table import Slot


def lookup(core: Core, namespace: bytes, chains: Sequence[bytes], parent: bytes, tail: Sequence[int]) -> Found:
    """See `Store.lookup`. What is found is the most recently used now, though no hit yet."""
    if core.offline or core.limits.off:
        return Found()
    hits: list[Entry] = []
    last, rows = parent, 0
    for chain in chains:
        slot = core.table.get(namespace, chain)
        if slot is None or slot.parent != last:
            break
        slot.used = core.clock()
        hits.append(entry(core, slot))
        last = chain
        rows += slot.tokens
    child = best_child(core, namespace, last, tail[rows:])
    core.counters["lookups"] += 1
    core.counters["lookup_hits"] += len(hits)
    return Found(tuple(hits), *child)


def best_child(
    core: Core, namespace: bytes, parent: bytes, tokens: Sequence[int]
) -> tuple[Entry | None, int, int | None]:
    """The stored child of `parent` that begins with most of `tokens`, with how many of them, and its next token. From
    the index alone: shards may lie on a disk that hangs."""
    nothing = None, 0, None
    if parent not in core.table.children:
        return nothing
    try:
        best = core.index.best_child(parent, tokens)
        slot = core.table.get(namespace, best[0]) if best else None
        if slot is None or best is None:
            return nothing
        chain, rows = best
        behind = core.index.tokens(chain)[rows:] if rows < slot.tokens else ()
    except IndexFailed as problem:
        core.index_failed(problem)
        return nothing
    if rows:
        slot.used = core.clock()
    return entry(core, slot), rows, behind[0] if behind else None


def entry(core: Core, slot: Slot) -> Entry:
    path = core.tree.shard(slot.namespace, slot.chain)
    return Entry(slot.chain, slot.parent, slot.tokens, path, slot.size, slot.checksum)
