"""Room for a shard, or the reason why not. Every reservation ends in a commit or is given up."""

from __future__ import annotations

import contextlib
from itertools import count
from typing import Final

from kvd.cache.chain import next_chain
from kvd.store.adopt import adopt
from kvd.store.base import FIRST_USE, Offer, Refusal, Reservation, disk_bytes
from kvd.store.core import Core
from kvd.store.kv import IndexFailed
from kvd.store.lookup import best_child

NUMBERS: Final = count(1)
"""of reservations, never used twice in a process: a store that was opened again takes no answer meant for the last"""


def reserve(core: Core, offer: Offer) -> Reservation | Refusal:
    """See `Store.reserve`."""
    namespace, chain = offer.namespace, offer.chain
    try:
        reason = _refuses(core, offer)
        if not reason:
            core.files.mkdir(core.tree.namespace(namespace))
            core.new_folders |= namespace not in core.namespaces
            core.namespaces.add(namespace)
    except OSError as problem:
        core.disk_failed(problem)
        reason = "io_error"
    if reason:
        core.counters[f"refused.{reason}"] += 1
        return Refusal(reason)
    number = next(NUMBERS)
    found = Reservation(
        number, offer, core.tree.temp(number, chain), core.tree.shard(namespace, chain), core.limits.durable
    )
    core.ledger.reserve(number, disk_bytes(offer.nbytes))
    core.pending[number] = found
    core.by_chain[chain] = number
    return found


def _refuses(core: Core, offer: Offer) -> str:
    """"" or a counter's name. Cheap reasons first; what makes room comes last."""
    namespace, chain, parent, tokens = offer.namespace, offer.chain, offer.parent, offer.tokens
    if core.limits.off:
        return "off"
    if core.offline:
        return "offline"
    if chain in core.orphans:
        with contextlib.suppress(IndexFailed):
            adopt(core, [core.orphans[chain]])
        if chain in core.orphans:
            return "index_failed"
    if chain in core.table.slots:
        return "exists"
    if chain in core.by_chain:
        return "pending"
    if offer.nbytes <= 0 or not tokens or next_chain(parent, tokens) != chain:
        return "bad_request"
    child, rows, _ = best_child(core, namespace, parent, tokens)
    if child is not None and rows == len(tokens):
        return "covered"
    if core.limits.admission == "second" and not core.sightings.again(chain):
        return FIRST_USE
    if not (parent == namespace or parent in core.table.slots or parent in core.by_chain or parent in core.orphans):
        return "parent_missing"
    disk = disk_bytes(offer.nbytes)
    if not core.make_quota(namespace, disk, parent):
        return "quota"
    return core.make_room(disk, parent)

