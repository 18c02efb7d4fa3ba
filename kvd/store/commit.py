"""The owner's half of a commit: folders to the drive, then one transaction for everything that is pending."""

from __future__ import annotations

import contextlib
import os
from hashlib import blake2b

from kvd.cache.chain import CHAIN_BYTES, token_bytes
from kvd.store.base import CommittedItem, Reservation, Written, disk_bytes
from kvd.store.core import SUPERSEDED, Core
from kvd.store.index import Batch
from kvd.store.kv import IndexFailed
from kvd.store.preview import PREVIEW
from kvd.store.table import Slot


def commit(core: Core, written: list[Written]) -> list[CommittedItem]:
    """See `Store.commit`."""
    results: dict[int, CommittedItem] = {}
    ready: list[tuple[Reservation, Slot]] = []
    seen: set[int] = set()
    for item in written:
        found = core.pending.get(item.reservation)
        if found is None or item.reservation in seen:
            core.counters["unknown_reservation"] += 1
            results[item.reservation] = CommittedItem(item.reservation, False, "unknown_reservation")
            continue
        seen.add(item.reservation)
        slot, reason = _check(core, found, item)
        if slot:
            ready.append((found, slot))
        else:
            results[item.reservation] = _refuse(core, found, reason)
    if ready:
        reason = _durable(core, ready)
        for found, slot in ready:
            results[found.id] = _refuse(core, found, reason) if reason else _accept(core, found, slot)
        _supersede(core, [] if reason else ready)
        with contextlib.suppress(OSError):
            core.measure()
    return [results[item.reservation] for item in written]


def give_up(core: Core, found: Reservation) -> None:
    """Forget a reservation and remove whatever was written for it."""
    core.pending.pop(found.id, None)
    core.by_chain.pop(found.offer.chain, None)
    core.ledger.settle(found.id, 0)
    for path in (found.temp, found.final):
        try:
            core.files.unlink(path)
        except FileNotFoundError:
            continue
        except OSError:
            core.counters["unlink_failed"] += 1
            core.junk[path] = disk_bytes(found.offer.nbytes)
    core.settle_other()


def _check(core: Core, found: Reservation, item: Written) -> tuple[Slot | None, str]:
    """The file is where it should be and no larger than what was reserved."""
    offer = found.offer
    try:
        there = core.files.stat(found.final)
    except OSError as problem:
        core.disk_failed(problem)
        return None, "vanished"
    if there.size != item.size:
        return None, "size_mismatch"
    if item.size > offer.nbytes or len(item.checksum) != CHAIN_BYTES:
        return None, "larger_than_reserved"
    disk = max(there.allocated, disk_bytes(item.size))
    slot = Slot(
        offer.namespace, offer.chain, offer.parent, item.checksum, len(offer.tokens), offer.start, item.size, disk, 0,
        core.clock(), there.mtime, offer.preview[:PREVIEW],
    )
    return slot, ""


def _durable(core: Core, ready: list[tuple[Reservation, Slot]]) -> str:
    """Folders, then the index; "" or the reason of the failure."""
    try:
        if core.limits.durable:
            _sync_folders(core, sorted({os.path.dirname(found.final) for found, _ in ready}))
        core.files.point("after_dirsync")
        core.files.point("before_commit")
        core.wear.add(sum(slot.size for _, slot in ready))
        added = [(slot, found.offer.tokens) for found, slot in ready]
        core.write_index(Batch(add=added, meta={"wear": core.wear.pack()}))
        core.files.point("after_commit")
    except OSError as problem:
        core.disk_failed(problem)
        return "io_error"
    except IndexFailed:
        return "index_failed"
    return ""


def _sync_folders(core: Core, folders: list[str]) -> None:
    """Names of new folders, then names in them; the last one takes everything before it out of the drive's cache."""
    if core.new_folders:
        core.files.fsync_dir(core.tree.blocks)
    for folder in folders[:-1]:
        core.files.fsync_dir(folder)
    core.files.full_fsync_dir(folders[-1])
    core.new_folders = False


def _accept(core: Core, found: Reservation, slot: Slot) -> CommittedItem:
    del core.pending[found.id]
    del core.by_chain[found.offer.chain]
    core.ledger.settle(found.id, slot.disk)
    core.table.add(slot)
    core.counters["committed"] += 1
    return CommittedItem(found.id, True)


def _refuse(core: Core, found: Reservation, reason: str) -> CommittedItem:
    core.counters[f"commit_failed.{reason}"] += 1
    give_up(core, found)
    return CommittedItem(found.id, False, reason)


def _supersede(core: Core, ready: list[tuple[Reservation, Slot]]) -> None:
    """Partial siblings whose tokens a new block starts with are of no more use; their pins move to the new block."""
    gone: dict[bytes, Slot] = {}
    for found, slot in ready:
        if len(core.table.children[slot.parent]) < 2:
            continue
        for chain in _prefixes(slot.parent, found.offer.tokens):
            if chain not in core.table.slots or chain in core.table.children:
                continue
            if core.pins.get(chain):
                try:
                    core.pins.move(chain, slot.chain)
                except OSError as problem:
                    core.disk_failed(problem)
                    continue
            gone[chain] = core.table.slots[chain]
    core.drop(gone.values(), SUPERSEDED)


def _prefixes(parent: bytes, tokens: tuple[int, ...]) -> set[bytes]:
    """Chains of all proper prefixes of a block: `next_chain`, carried on token by token."""
    digest = blake2b(parent, digest_size=CHAIN_BYTES)
    raw = token_bytes(tokens)
    found = set()
    for at in range(0, len(raw) - 4, 4):
        digest.update(raw[at : at + 4])
        found.add(digest.copy().digest())
    return found
