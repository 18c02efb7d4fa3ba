"""Bringing a stored prefix into the pool: which blocks to read, their landing, and what failed. Engine thread only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm

from kvd.cache.landing import BlockLanding
from kvd.cache.layout import KVLayout
from kvd.cache.paged import PagedCache
from kvd.cache.results import Match
from kvd.cache.sequence import CachedSequence
from kvd.messages import BadShard, Entry, LookedUp, Touched
from kvd.store.shard import Expected
from kvd.worker.arrival import VANISHED, Arrival, Order, layer_groups
from kvd.worker.outbox import Outbox
from kvd.worker.patience import STILL_S, Patience
from kvd.worker.planner import Rates, meet
from kvd.worker.request import Choice
from kvd.worker.restore import Readers
from kvd.worker.scheduler import Stage
from kvd.worker.spill import tensors_by_rows

CHEAPER = "recompute_cheaper"


@dataclass(slots=True, eq=False)
class Restore:
    """One prefix on its way. A pass may begin over it when its first layers are there: it is `Arriving`."""

    choice: Choice
    seq: CachedSequence
    """the choice's, closed if it ends before this"""
    start: int
    """rows before the first entry: those that are not there yet are computed meanwhile"""
    entries: Sequence[Entry]
    landings: Sequence[BlockLanding]
    rows: int
    """of the choice's sequence once all of it is there"""
    child_rows: int
    """rows of the last entry that the prompt shares; 0: the last entry is a full block of the prompt"""
    arrival: Arrival
    patience: Patience
    end: Callable[[Restore], None]
    given_up: bool = False
    """a pass over it was left: it is not tried again"""
    wrote: bool = False
    """a pass over it, be it one that was left, has put rows behind those restored: over those of the last entry"""

    @property
    def ready(self) -> bool:
        """Whether a pass over what is not there yet can begin now."""
        return (
            not self.given_up and self.choice.stage is Stage.LOADING and self.arrival.there(0)
            and not self.arrival.done and self.arrival.remaining_s <= STILL_S
            and all(landing.usable for landing in self.landings)
        )  # fmt: skip

    @property
    def waits(self) -> bool:
        """Whether there is nothing but the disk to wait for: what lies before it is computed, if anybody needs it."""
        return self.seq.closed or self.seq.rows == self.start

    def there(self, layer: int) -> bool:
        return self.arrival.there(layer)

    def wait(self, layer: int) -> None:
        """Raises Unfinished."""
        self.arrival.wait(layer, self.patience.left)
        self.settle()

    def settle(self) -> None:
        """Bring what has landed into the pool, where it is not yet."""
        while self.arrival.landed:
            block, group = self.arrival.landed.popleft()
            self.landings[block].settle(self.entries[block].tokens, self.arrival.groups[group].tensors)

    def finish(self) -> None:
        """A pass over it is through: accept every block, with all of its bytes read and checked. Raises Unfinished;
        then nothing was accepted."""
        for group in self.arrival.groups:
            self.wait(group.layers - 1)
        self.end(self)

    def used(self, block: int) -> int:
        """Rows of a block that the sequence takes."""
        last = block == len(self.entries) - 1
        return self.child_rows if last and self.child_rows else self.entries[block].tokens


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
        patience: Patience,
        finished: Callable[[Choice, str, Sequence[bytes]], None],
        chunk: int,
    ) -> None:
        """chunk: rows per prefill step."""
        self._cache = cache
        self._tensors = tensors_by_rows(layout)
        self._readers = readers
        self._outbox = outbox
        self._rates = rates
        self._patience = patience
        self._finished = finished
        self._groups = layer_groups(layout, cache.block_size)
        self._grid = lcm(chunk, cache.block_size)
        self._open: dict[Arrival, Restore] = {}
        self._left: list[tuple[Arrival, int, BlockLanding]] = []
        """blocks that were given up while they were read: a late read may still write to them"""

    @property
    def hung(self) -> bool:
        """Whether the disk hangs, so that nothing is to be read."""
        return self._readers.silent

    def probe(self, match: Match, found: LookedUp) -> None:
        """While it hangs: find out, without waiting, whether all of it does."""
        self._readers.probe([entry.path for entry in _missing(match, found)])

    def gain(self, match: Match, found: LookedUp) -> int:
        """Leading tokens that would be there after a restore, if that is more than memory has; else 0."""
        rows = self.rows(found)
        return rows if rows > match.rows else 0

    def rows(self, found: LookedUp) -> int:
        """Leading tokens that the store has."""
        return len(found.hits) * self._cache.block_size + found.child_rows

    def computed(self, match: Match, found: LookedUp, *, both: bool) -> int:
        """Up to which row computing is faster than reading, by what has been measured: at least the match's full
        blocks, at most what a restore would give. both: reading and computing may go on at once."""
        size, last = self._cache.block_size, self.rows(found)
        missing = _missing(match, found)
        start = row = len(match.blocks) * size
        nbytes = sum(entry.size for entry in missing)
        cuts = [(start, nbytes)]
        for entry in missing:
            row, nbytes = row + size, nbytes - entry.size
            if row % self._grid == 0 and row < last:
                cuts.append((row, nbytes))
        return meet(self._rates, start, [*cuts, (last, 0)], both)

    def stored_token(self, found: LookedUp, ahead: int) -> int | None:
        """The token with which the store's best child leaves a prompt that goes on for `ahead` tokens behind the hits;
        None where nothing does."""
        return found.child_token if found.child_rows < ahead else None

    def start(self, choice: Choice, match: Match, found: LookedUp, start: int) -> None:
        """Reserve landings behind row `start`, a border of blocks, and order their reads. The choice's sequence holds
        the match's full blocks and has room for the rows between. Raises PoolFull; then nothing has changed."""
        seq, size = choice.seq, self._cache.block_size
        assert seq is not None
        computed = start // size - len(match.blocks)
        entries = _missing(match, found)[computed:]
        landings = seq.landing(len(entries), computed)
        self._cache.pool.evaluate()  # a step in line may still write a row of a block that has just become free
        child_rows = found.child_rows if found.child is not None else 0
        rows = self.rows(found)
        orders = [
            self._order(choice, entry, landing, start + at * size, rows)
            for at, (entry, landing) in enumerate(zip(entries, landings, strict=True))
        ]
        arrival = Arrival(orders, self._groups, self._patience.news, each=landings[0].staged)
        self._open[arrival] = Restore(
            choice, seq, start, entries, landings, rows, child_rows, arrival, self._patience, self._end
        )
        self._readers.submit(arrival)

    def _order(self, choice: Choice, entry: Entry, landing: BlockLanding, start: int, stop: int) -> Order:
        """stop: rows of the prompt that the store has."""
        known = choice.target[start : min(start + entry.tokens, stop)]
        expected = Expected(
            choice.request.namespace, entry.chain, entry.parent, known, start, self._tensors(entry.tokens)
        )
        return Order(entry, expected, lambda tensors: landing.writing(entry.tokens, tensors))

    def told(self, arrival: Arrival) -> None:
        """Some of an arrival has come, or failed."""
        restore = self._open.get(arrival)
        if restore is None:
            return  # a pass has taken it
        restore.settle()

    def due(self) -> float | None:
        """When a restore is given up if nothing comes until then; None: nobody waits for one."""
        waiting = [one.arrival for one in self._open.values() if one.waits and not one.arrival.done]
        return min(map(self._readers.due, waiting), default=None)

    def collect(self) -> None:
        """End the restores that are over, or for which a disk that hangs is not waited for any longer."""
        self._release()
        for restore in [one for one in self._open.values() if one.waits]:
            arrival = restore.arrival
            if not arrival.done and self._readers.due(arrival) <= self._patience.now():
                self._readers.stop(arrival)
            if arrival.done:
                restore.settle()
                self._end(restore)

    def _release(self) -> None:
        """Let go of blocks that were left, once the read that was at them has come back."""
        left, self._left = self._left, []
        for arrival, block, landing in left:
            if block in self._readers.reading(arrival):
                self._left.append((arrival, block, landing))
            else:
                landing.reject()

    def ready(self) -> Restore | None:
        """A restore over which a pass can begin before all of it is there."""
        return next((restore for restore in self._open.values() if restore.ready), None)

    def _end(self, restore: Restore) -> None:
        """Nothing more is waited for: accept the blocks in order, since each must follow from the one before."""
        choice, arrival = restore.choice, restore.arrival
        del self._open[arrival]
        space = choice.request.namespace
        for block, failure in arrival.failures.items():
            if failure.damaged or failure.reason == VANISHED:
                self._outbox.tell(BadShard(space, restore.entries[block].chain, failure.reason))
        reading = self._readers.reading(arrival) if arrival.stopped else ()
        for block, (entry, landing) in enumerate(zip(restore.entries, restore.landings, strict=True)):
            if block in arrival.failures and block in reading:
                landing.leave()
                self._left.append((arrival, block, landing))
                continue
            if block in arrival.failures:
                landing.reject()
                continue
            # Blocks behind a failed one are of no use to this sequence, but they are right: memory keeps them.
            used = restore.used(block)
            landing.accept(
                arrival.tokens(block), entry.chain, parent=entry.parent, used=used,
                overwritten=restore.wrote and used < entry.tokens,
            )  # fmt: skip
        if used_chains := tuple(e.chain for b, e in enumerate(restore.entries) if b not in arrival.failures):
            self._outbox.tell(Touched(space, used_chains))
        if not arrival.stopped:
            self._rates.restored(arrival.nbytes, arrival.seconds)
        first = min(arrival.failures, default=None)
        reason = arrival.failures[first].reason if first is not None else ""
        lost = tuple(entry.chain for entry in restore.entries[first:]) if first is not None else ()
        self._finished(choice, reason, lost)


def _missing(match: Match, found: LookedUp) -> list[Entry]:
    """Entries of the store behind the match's full blocks, the child last."""
    entries = list(found.hits[len(match.blocks) :])
    if found.child is not None and found.child_rows:
        entries.append(found.child)
    return entries
