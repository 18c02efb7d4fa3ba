"""Long rounds over the whole store: verify, gc, clear, rebuild.

Each is a generator that yields `(done, total)` after every small step and returns a `Report`, so that the owner's
thread can answer others in between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator

from kvd.store.adopt import adopt, quarantine_file, reset_index
from kvd.store.base import Report
from kvd.store.core import Core
from kvd.store.index import Batch
from kvd.store.kv import IndexFailed
from kvd.store.opening import compact
from kvd.store.scan import remove, scan
from kvd.store.shard import Expected, ShardDamaged, ShardReader
from kvd.store.table import Slot

Round = Generator[tuple[int, int], None, Report]
SCRATCH = 1 << 20
STEP = 64


def verify(core: Core) -> Round:
    """Read every shard and check every byte; damaged ones go to quarantine, missing ones out of the index. What cannot
    be read for another reason is counted and left alone."""
    counts: Counter[str] = Counter()
    freed = checked = 0
    chains = list(core.table.slots)
    scratch = bytearray(SCRATCH)
    for done, chain in enumerate(chains, 1):
        if slot := core.table.slots.get(chain):
            checked += 1
            reason = check_shard(core, slot, scratch)
            counts[reason or "ok"] += 1
            if reason and reason != "unreadable":
                freed += slot.disk
                _take_out(core, slot, reason)
        yield done, len(chains)
    return Report(checked, freed, dict(counts))


def check_shard(core: Core, slot: Slot, scratch: bytearray) -> str:
    """Read all of a shard: "" or what is wrong with it, a counter's name. `scratch` grows to its largest tensor."""
    try:
        path = core.tree.shard(slot.namespace, slot.chain)
        expected = Expected(slot.namespace, slot.chain, slot.parent, (), slot.start)
        with ShardReader(core.files, path, expected, size=slot.size, checksum=slot.checksum) as reader:
            for spec in reader.header.tensors:
                if len(scratch) < spec.nbytes:
                    scratch.extend(bytes(spec.nbytes - len(scratch)))
                reader.read([memoryview(scratch)[: spec.nbytes]])
    except ShardDamaged as damage:
        return damage.reason
    except FileNotFoundError:
        return "vanished"
    except OSError:
        return "unreadable"
    return ""


def _take_out(core: Core, slot: Slot, reason: str) -> None:
    try:
        core.write_index(Batch(remove=[slot]))
    except IndexFailed:
        core.counters["index.row_left"] += 1
    core.forget(slot)
    quarantine_file(core, core.tree.shard(slot.namespace, slot.chain), slot.disk, reason)
    core.settle_other()


def gc(core: Core) -> Round:
    """Collect what is of no use: foreign and old-format files, quarantine, leftovers of dead writers, expired pins,
    blocks that no lookup can reach, empty folders, free pages of the index. Raises OSError, IndexFailed."""
    before = core.ledger.usage().used
    counts: Counter[str] = Counter()
    _rescan(core)
    waiting = list(core.orphans.values())
    for at in range(0, len(waiting), STEP):
        counts["adopted"] += adopt(core, [file for file in waiting[at : at + STEP] if file.chain in core.orphans])
        yield at, len(waiting)
    counts["pins_expired"] = core.pins.expire(core.clock())
    counts["junk"] = len(core.junk) + len(core.quarantined)
    core.collect_junk()
    strays = [core.table.slots[c] for c in core.table.strays()]
    core.drop(strays, "collected.stray")
    counts["strays"] = len(strays)
    pending = {r.offer.namespace for r in core.pending.values()}
    for namespace in core.namespaces - set(core.table.by_namespace) - pending:
        remove(core.files, core.tree.namespace(namespace))
        core.namespaces.discard(namespace)
        counts["folders"] += 1
    compact(core)
    core.measure()
    yield len(waiting), len(waiting)
    return Report(len(core.table), before - core.ledger.usage().used, {k: n for k, n in counts.items() if n})


def clear(core: Core, only: Collection[bytes] = ()) -> Round:
    """Drop all blocks, pins, damaged and foreign files, or those of some namespaces `only`; all of them also with what
    is remembered of prefixes seen once. What is being written right now stays. Raises OSError."""
    counts: Counter[str] = Counter(blocks=0)
    freed = 0
    core.pins.clear(only)
    _rescan(core)
    for orphan in [o for o in core.orphans.values() if not only or o.namespace in only]:  # before any is adopted
        freed += core.unlink(core.tree.shard(orphan.namespace, orphan.chain), orphan.disk)
        core.forget_orphan(orphan)
        counts["orphans"] += 1
    slots = [s for s in core.table if not only or s.namespace in only]
    slots.sort(key=lambda s: -s.start)
    for at in range(0, len(slots), STEP):
        there = [s for s in slots[at : at + STEP] if core.table.slots.get(s.chain) is s]
        freed += core.drop(there, "cleared")
        counts["blocks"] += len(there)
        yield at, len(slots)
    if not only:
        core.sightings.clear()
    freed += core.collect_junk(of=only)
    counts["being_written"] = sum(1 for r in core.pending.values() if not only or r.offer.namespace in only)
    compact(core)
    core.measure()
    return Report(counts["blocks"], freed, {name: n for name, n in counts.items() if n or name == "blocks"})


def rebuild(core: Core) -> Round:
    """A new index from the shards' headers: same hits, same pins; hit counts restart. Raises OSError, IndexFailed."""
    _rescan(core)
    reset_index(core)
    done = 0
    waiting = list(core.orphans.values())
    for at in range(0, len(waiting), STEP):
        yield at, len(waiting)
        done += adopt(core, [file for file in waiting[at : at + STEP] if file.chain in core.orphans])
    core.measure()
    return Report(len(core.table), 0, {"adopted": done})


def _rescan(core: Core) -> None:
    """Find what came into the folder behind the store's back."""
    found = scan(core.files, core.tree)
    pending = {r.offer.chain for r in core.pending.values()}
    temps = {r.temp for r in core.pending.values()}
    core.junk.update(found.foreign)
    core.junk.update({path: disk for path, disk in found.temp.items() if path not in temps})
    core.quarantined.update(found.quarantine)
    core.namespaces |= found.namespaces
    for chain, file in found.shards.items():
        if chain not in core.table.slots and chain not in pending:
            core.orphans[chain] = file
    core.settle_other()
