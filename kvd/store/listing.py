"""What the store holds, for people and machines: `stats` and the tree of `ls`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from typing import Any

from kvd.store.base import Node
from kvd.store.core import Core
from kvd.store.table import Slot
from kvd.store.words import told_apart


def stats(core: Core) -> dict[str, Any]:
    """See `Store.stats`."""
    usage = core.ledger.usage()
    by_model: Counter[str] = Counter()
    for namespace, nbytes in core.table.by_namespace.items():
        by_model[core.model_of(namespace)] += nbytes
    held = sum(1 for pin in core.pins if pin.chain in core.table.slots)
    return {
        "path": core.tree.root,
        "limit": usage.limit,
        "used": usage.used,
        "shards_bytes": usage.shards,
        "reserved_bytes": usage.reserved,
        "other_bytes": usage.other,
        "blocks": len(core.table),
        "tokens": core.table.tokens,
        "orphans": len(core.orphans),
        "foreign_files": len(core.junk),
        "foreign_bytes": sum(core.junk.values()),
        "quarantined_files": len(core.quarantined),
        "quarantined_bytes": sum(core.quarantined.values()),
        "pending": len(core.pending),
        "pins": held,
        "pins_waiting": len(core.pins) - held,
        "trimmed": dict(core.trimmed) if core.trimmed["blocks"] else {},
        "durable": core.limits.durable,
        "offline": core.offline,
        "off": core.limits.off,
        "models": dict(by_model),
        "shared": sorted({core.owners(n) for n in core.table.by_namespace if len(core.owners(n)) > 1}),
        "written_today_bytes": core.wear.today,
        "written_total_bytes": core.wear.total,
        "written_per_year_bytes": core.wear.per_year(),
        "endurance_per_year": core.wear.endurance_per_year(core.limits.tbw),
        "counters": {name: count for name, count in sorted(core.counters.items()) if count},
    }


Listing = Generator[tuple[int, int], None, tuple[Node, ...]]


def tree(core: Core, model: str | None = None) -> Listing:
    """All stored prefixes, or those of one model (its name or a namespace): stretches of blocks, ending where prompts
    diverge or a pin ends, last used first. Strays are at the top as well. Yields (done, total) of what is read for
    it."""
    held = {slot.chain for chain in core.pins.held(core.clock()) for slot in core.table.path(chain)}
    tops = [s for s in core.table if s.parent not in core.table.slots]
    if model:
        tops = [s for s in tops if model in (*core.owners(s.namespace), s.namespace.hex())]
    runs = {run[0].chain: run for top in tops for run in _stretches(core, top)}
    used = {chain: max(s.used for s in run) for chain, run in runs.items()}
    tops.sort(key=lambda s: (core.model_of(s.namespace), s.namespace, -used[s.chain]))
    nodes: list[Node] = []
    waiting = [(top, 0, "") for top in reversed(tops)]
    first: list[Slot] = []
    while waiting:
        slot, depth, parent = waiting.pop()
        run = runs[slot.chain]
        first.append(slot)
        nodes.append(_node(core, run, held, depth, parent))
        below = sorted(core.table.children.get(run[-1].chain, ()), key=lambda chain: used[chain])
        waiting += [(core.table.slots[chain], depth + 1, nodes[-1].chain) for chain in below]
    return (yield from told_apart(core, nodes, first))


def _stretches(core: Core, top: Slot) -> list[list[Slot]]:
    """Runs of blocks without a branch or the end of a pin below and including `top`, parents before children."""
    found: list[list[Slot]] = []
    waiting = [top]
    while waiting:
        run = [waiting.pop()]
        while len(children := core.table.children.get(run[-1].chain, ())) == 1 and not core.pins.get(run[-1].chain):
            run.append(core.table.slots[next(iter(children))])
        found.append(run)
        waiting += [core.table.slots[c] for c in children]
    return found


def _node(core: Core, run: list[Slot], held: set[bytes], depth: int, parent: str) -> Node:
    pin = core.pins.get(run[-1].chain)
    return Node(
        run[0].namespace.hex(), core.model_of(run[0].namespace), run[-1].chain.hex(),
        next((s.preview for s in run if s.preview), ""), run[0].start, sum(s.tokens for s in run), len(run),
        sum(s.size for s in run), max(s.hits for s in run), max(s.used for s in run),
        run[-1].chain in held, pin.expires if pin else None, depth, parent,
    )
