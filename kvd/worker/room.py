"""Whether a choice that once found no room in the pool has it now."""

from __future__ import annotations

from kvd.cache.paged import PagedCache
from kvd.worker.live import Live
from kvd.worker.request import Choice
from kvd.worker.scheduler import Stage


def has_room(choice: Choice, live: Live, cache: PagedCache) -> bool:
    """Room for all of a choice, beside what those that are live still take for their prompts and one block of each
    answer: it must not be preempted again at once. Always where nobody is live."""
    others = [one for one in live.choices if one.stage is not Stage.WAITING]
    if not others:
        return True
    pool, size, refs = cache.stats, cache.block_size, cache.manager.refs
    room = pool.blocks_limit - pool.blocks_live
    for one in others:
        held = len(one.seq.block_table) if one.seq is not None else 0
        room -= max(len(one.target) // size + 2 - held, 1)
    needed = len(choice.target) // size + 2
    if room >= needed:
        return True
    known = cache.match(choice.target, choice.request.namespace).blocks
    return room >= needed - sum(entry.block is not None and refs[entry.block] > 0 for entry in known)
