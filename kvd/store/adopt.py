"""Shards without a row: read their headers and give them one. A rebuild adopts everything."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from kvd.store.core import FULL_PINNED, Core
from kvd.store.header import Parsed, ShardDamaged
from kvd.store.index import Batch
from kvd.store.preview import PREVIEW
from kvd.store.scan import ShardFile
from kvd.store.shard import read_header
from kvd.store.table import Slot

BATCH = 256
"""shards per transaction"""


def adopt(core: Core, orphans: Iterable[ShardFile]) -> int:
    """Give rows to shards whose headers check out (their data is checked when it is read); returns how many.

    The rest is quarantined, collected (old formats) or, if it vanished, forgotten. Raises OSError, IndexFailed: what is
    not adopted yet stays an orphan."""
    waiting = list(orphans)
    done = 0
    for at in range(0, len(waiting), BATCH):
        part = waiting[at : at + BATCH]
        found = [(file, parsed) for file in part if (parsed := _readable(core, file)) is not None]
        if core.limits.durable:
            for namespace in {file.namespace for file, _ in found}:
                core.files.fsync_dir(core.tree.namespace(namespace))
        slots = [(slot_of(parsed, file.disk, file.mtime), parsed.header.tokens) for file, parsed in found]
        core.write_index(Batch(add=slots))
        for slot, _ in slots:
            del core.orphans[slot.chain]
            core.table.add(slot)
            core.ledger.shards += slot.disk
        core.counters["adopted"] += len(slots)
        done += len(slots)
        core.settle_other()
    return done


def slot_of(parsed: Parsed, disk: int, mtime: float) -> Slot:
    """The row of a shard of which only the file is known: no hits, last used at the file's time."""
    header = parsed.header
    return Slot(
        header.namespace, header.chain, header.parent, parsed.checksum, len(header.tokens), header.start,
        parsed.file_bytes, disk, 0, mtime, mtime, header.preview[:PREVIEW],
    )


def _readable(core: Core, file: ShardFile) -> Parsed | None:
    path = core.tree.shard(file.namespace, file.chain)
    try:
        parsed = read_header(core.files, path)
        if (parsed.header.namespace, parsed.header.chain) != (file.namespace, file.chain):
            raise ShardDamaged("other_block")
    except FileNotFoundError:
        core.counters["vanished"] += 1
    except ShardDamaged as damage:
        if damage.reason == "old_format":
            core.junk[path] = file.disk
            core.counters["old_format"] += 1
        else:
            quarantine_file(core, path, file.disk, damage.reason)
    else:
        return parsed
    core.forget_orphan(file)
    return None


def quarantine_file(core: Core, path: str, disk: int, reason: str) -> None:
    """Move a damaged shard out of the way, kept for a look until room is needed."""
    name = f"{os.path.basename(os.path.dirname(path))}-{os.path.basename(path)}.{reason}"
    target = os.path.join(core.tree.quarantine, name)
    try:
        core.files.rename(path, target)
    except FileNotFoundError:
        core.counters["vanished"] += 1
        return
    except OSError:
        core.unlink(path, disk)
        return
    core.counters[f"quarantined.{reason}"] += 1
    core.quarantined[target] = disk
    core.settle_other()


def enforce(core: Core) -> None:
    """Limits hold on return. Orphans get their rows first if anything has to go, so that pins and the order of leaving
    are known for them too. A store that is off is left as it is. What goes because the limit itself is exceeded, not
    only its headroom, is told (`Core.trimmed`): somebody lowered it. Raises OSError, IndexFailed."""
    if core.limits.off:
        return
    if core.orphans and core.ledger.missing(0) > 0:
        adopt(core, list(core.orphans.values()))
    over = core.ledger.usage().over > 0
    blocks, nbytes, pinned = len(core.table), core.table.bytes, core.counters[FULL_PINNED]
    try:
        core.make_room(0, force=True)
    finally:
        if over:
            pinned = core.counters[FULL_PINNED] - pinned
            core.trimmed.update(blocks=blocks - len(core.table), bytes=nbytes - core.table.bytes, pinned=pinned)


def rebuild_index(core: Core) -> int:
    """A new index from the shards; returns how many have a row again. Raises OSError, IndexFailed."""
    reset_index(core)
    return adopt(core, list(core.orphans.values()))


def reset_index(core: Core) -> None:
    """An empty index: every shard becomes an orphan, to be adopted. Hit counts restart at 0, last use is the file's
    time. Raises OSError, IndexFailed."""
    core.counters["index.rebuilt"] += 1
    core.index.close()
    for name in ("data.mdb", "lock.mdb", "clean.json"):
        with contextlib.suppress(FileNotFoundError):
            core.files.unlink(os.path.join(core.tree.index, name))
    for slot in list(core.table):
        core.forget(slot, departed=False)
        core.orphans[slot.chain] = ShardFile(slot.namespace, slot.chain, slot.size, slot.disk, slot.mtime)
    core.settle_other()
    core.index.reopen()
    core.index_lost = False
