"""Bringing a stored prefix into the pool: which blocks to read, their landing, and what failed. Engine thread only."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvd.cache.landing import BlockLanding
from kvd.cache.layout import KVLayout
from kvd.cache.paged import PagedCache
from kvd.cache.results import Match
from kvd.messages import BadShard, Entry, LookedUp, Touched
from kvd.store.shard import Expected, ShardDamaged, read_header
from kvd.worker.outbox import Outbox
from kvd.worker.planner import Rates, recompute_is_cheaper
from kvd.worker.request import Choice
from kvd.worker.restore import VANISHED, BlockRead, Order, Readers
from kvd.worker.spill import tensor_specs

CHEAPER = "recompute_cheaper"


@dataclass(slots=True)
class _Restore:
    """One prefix on its way. `reads` that came out of order wait for those before them."""

    choice: Choice
    entries: list[Entry]
    landings: list[BlockLanding]
    child_rows: int
    """rows of the last entry that the prompt shares; 0: the last entry is a full block of the prompt"""
    began: float
    reads: dict[int, BlockRead] = field(default_factory=dict)
    next: int = 0
    nbytes: int = 0
    failed: str = ""
    lost: list[Entry] = field(default_factory=list)
    """from the first failed one on: for all that is known they are no use to anybody"""


class Fetcher:
    """`finished(choice, reason, lost)` is called when nothing more comes for a choice: reason names the first failure
    ("" if none), lost the chains that did not come from there on."""

    def __init__(
        self,
        cache: PagedCache,
        layout: KVLayout,
        readers: Readers,
        outbox: Outbox,
        rates: Rates,
        finished: Callable[[Choice, str, Sequence[bytes]], None],
    ) -> None:
        self._cache = cache
        self._layout = layout
        self._readers = readers
        self._outbox = outbox
        self._rates = rates
        self._finished = finished
        self._tickets = itertools.count(1)
        self._open: dict[int, _Restore] = {}

    def gain(self, match: Match, found: LookedUp) -> int:
        """Leading tokens that would be there after a restore, if that is more than memory has; else 0."""
        rows = self.rows(found)
        return rows if rows > match.rows else 0

    def rows(self, found: LookedUp) -> int:
        """Leading tokens that the store has."""
        return len(found.hits) * self._cache.block_size + found.child_rows

    def worth(self, match: Match, found: LookedUp) -> bool:
        """False: by what has been measured, computing these rows is faster than reading them."""
        missing = _missing(match, found)
        return not recompute_is_cheaper(
            self._rates, len(match.blocks) * self._cache.block_size, self.gain(match, found),
            sum(entry.size for entry in missing),
        )  # fmt: skip

    def stored_token(self, found: LookedUp, ahead: int) -> int | None:
        """The token with which the store's best child leaves a prompt that goes on for `ahead` tokens behind the hits;
        None where nothing does. Reads the child's header."""
        if found.child is None or found.child_rows >= min(found.child.tokens, ahead):
            return None
        try:
            return read_header(self._readers.files, found.child.path).header.tokens[found.child_rows]
        except (ShardDamaged, OSError):
            return None

    def start(self, choice: Choice, match: Match, found: LookedUp) -> None:
        """Reserve landings behind the match's full blocks (the choice's sequence holds them) and order their reads.
        Raises PoolFull; then nothing has changed."""
        assert choice.seq is not None
        entries = _missing(match, found)
        landings = choice.seq.landing(len(entries))
        self._cache.pool.evaluate()  # a step in line may still write a row of a block that has just become free
        ticket = next(self._tickets)
        child_rows = found.child_rows if found.child is not None else 0
        self._open[ticket] = _Restore(choice, entries, landings, child_rows, time.monotonic())
        first = len(match.blocks)
        size = self._cache.block_size
        for index, (entry, landing) in enumerate(zip(entries, landings, strict=True)):
            start = (first + index) * size
            expected = Expected(
                choice.request.namespace, entry.chain, entry.parent,
                choice.target[start : start + self._used(entry, index, self._open[ticket])], start,
                tensor_specs(self._layout, entry.tokens),
            )  # fmt: skip
            self._readers.submit(Order(ticket, index, entry, expected, landing.buffers(entry.tokens)))

    def read(self, result: BlockRead) -> None:
        """A reader is done with one shard. Blocks are accepted in order, since each must follow from the one before."""
        restore = self._open[result.ticket]
        restore.reads[result.index] = result
        while restore.next in restore.reads:
            self._land(restore, restore.next, restore.reads.pop(restore.next))
            restore.next += 1
        if restore.next == len(restore.entries):
            del self._open[result.ticket]
            self._rates.restored(restore.nbytes, time.monotonic() - restore.began)
            if used := tuple(entry.chain for entry in restore.entries[: len(restore.entries) - len(restore.lost)]):
                self._outbox.tell(Touched(restore.choice.request.namespace, used))
            self._finished(restore.choice, restore.failed, tuple(entry.chain for entry in restore.lost))

    def _land(self, restore: _Restore, index: int, result: BlockRead) -> None:
        entry, landing = restore.entries[index], restore.landings[index]
        if result.damaged or result.reason == VANISHED:
            self._outbox.tell(BadShard(restore.choice.request.namespace, entry.chain, result.reason))
        if result.reason:
            restore.failed = restore.failed or result.reason
            restore.lost = restore.lost or restore.entries[index:]
            landing.reject()
            return
        restore.nbytes += result.nbytes
        self._outbox.tell(Touched(restore.choice.request.namespace, (entry.chain,)))
        # Blocks behind a failed one are of no use to this sequence, but they are right: memory keeps them.
        landing.accept(result.tokens, entry.chain, parent=entry.parent, used=self._used(entry, index, restore))

    def _used(self, entry: Entry, index: int, restore: _Restore) -> int:
        last = index == len(restore.entries) - 1
        return restore.child_rows if last and restore.child_rows else entry.tokens


def _missing(match: Match, found: LookedUp) -> list[Entry]:
    """Entries of the store behind the match's full blocks, the child last."""
    entries = list(found.hits[len(match.blocks) :])
    if found.child is not None and found.child_rows:
        entries.append(found.child)
    return entries
