"""The owner's state and the steps every part of the store is made of: count, measure, make room, drop.

One thread owns it (asserted by `Store`). Orders that matter: evict = index first, then unlink; commit = folder first,
then index. So whatever a crash cuts off leaves a file without a row or a row without a file, never a wrong block.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from kvd.store.admit import Sightings
from kvd.store.base import Limits, Reservation
from kvd.store.departed import Departures
from kvd.store.evict import plan
from kvd.store.files import Files
from kvd.store.index import BATCH, Batch, Index
from kvd.store.kv import IndexFailed
from kvd.store.ledger import Ledger
from kvd.store.pins import Pins
from kvd.store.scan import ShardFile, remove
from kvd.store.table import Slot, Table
from kvd.store.tree import INDEX_FILES, OURS, Tree
from kvd.store.wear import Wear

DAMAGED_INDEX = frozenset(
    {"CorruptedError", "PageNotFoundError", "InvalidError", "PanicError", "BadTxnError", "damaged", "closed"}
)
"""Reasons after which opening the index anew is not enough."""
SUPERSEDED = "evicted.superseded"
FULL_PINNED = "evicted.full_pinned"
SLACK = 100
"""Room is made for 1/100 of the limit at once, so that the plan is not made anew for every block."""
VAIN_S = 60.0
VAIN_MOST_S = 3600.0
"""Seconds until blocks are dropped for the volume's free space again when that did not rise, doubled each time. A
snapshot (APFS takes one every hour for Time Machine; btrfs, ZFS) keeps what is unlinked: all blocks would go for
nothing. Some file systems free later: by then that is seen."""


class Core:
    """What all parts of the store share. Bytes as `du` counts them, unless named otherwise.

    Between two steps: `ledger.shards` is the sum of `table`; `pending` and `by_chain` name the same reservations; a
    chain is in one of `table`, `orphans` and `by_chain` at most."""

    def __init__(
        self, files: Files, tree: Tree, limits: Limits, clock: Callable[[], float], index: Index
    ) -> None:
        self.files = files
        self.index = index
        self.tree = tree
        self.limits = limits
        self.clock = clock
        self.table = Table()
        self.ledger = Ledger(limits.limit)
        self.pins = Pins(files, tree.small("pins.json"), limits.durable)
        self.wear = Wear(clock)
        self.sightings = Sightings()
        self.departed = Departures()
        self.counters: Counter[str] = Counter()
        self.pending: dict[int, Reservation] = {}
        self.by_chain: dict[bytes, int] = {}
        """chain -> pending reservation"""
        self.orphans: dict[bytes, ShardFile] = {}
        """shards without a row: committed by nobody we know, adopted in `tend`"""
        self.junk: dict[str, int] = {}
        """foreign files, old formats, what could not be unlinked: path -> bytes, collected when room is needed"""
        self.quarantined: dict[str, int] = {}
        self.new_folders = True
        """Names in `blocks` may not be on the drive yet (at a start: who knows)."""
        self.namespaces: set[bytes] = set()
        """those that have a folder"""
        self.models: dict[bytes, tuple[str, ...]] = {}
        """namespace -> names of the models that used it, as the front labelled it: several may have the same weights"""
        self.fixed = 0
        self.offline = ""
        """why the disk cannot be used now; empty: it can"""
        self.index_lost = False
        self.vain_s = 0.0
        """Seconds to wait since `vain_at`, when dropping blocks left the free space as it was; 0: it did not"""
        self.vain_at = 0.0
        self.trimmed: Counter[str] = Counter()
        """blocks, bytes and pinned (blocks) that a lowered limit took since the store was opened"""

    # -- measuring -----------------------------------------------------------------------------------------------

    def measure(self) -> None:
        """Bring the ledger's `other` up to date: index, folders and small files are measured, the rest is known."""
        paths = [self.tree.root, *(self.tree.namespace(n) for n in self.namespaces)]
        paths += [os.path.join(self.tree.index, name) for name in INDEX_FILES]
        paths += [self.tree.small(name) for name in OURS]
        total = 0
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                total += self.files.stat(path).allocated
        self.fixed = total
        self.settle_other()

    def settle_other(self) -> None:
        orphans = sum(o.disk for o in self.orphans.values())
        self.ledger.other = self.fixed + orphans + sum(self.junk.values()) + sum(self.quarantined.values())

    def owners(self, namespace: bytes) -> tuple[str, ...]:
        """Names of the models of a namespace; its own where none is known."""
        return self.models.get(namespace) or (namespace.hex(),)

    def model_of(self, namespace: bytes) -> str:
        return ", ".join(self.owners(namespace))

    def held(self, parent: bytes = b"") -> set[bytes]:
        """Chains that eviction must leave: pins, and the parents of what is being written or, `parent`, about to be."""
        return self.pins.held(self.clock()) | {r.offer.parent for r in self.pending.values()} | {parent}

    # -- room ----------------------------------------------------------------------------------------------------

    def space_missing(self, nbytes: int) -> int:
        """Bytes that must be freed so that the volume keeps its free space with `nbytes` more. Raises OSError."""
        if not self.limits.free_space:
            return 0
        outstanding = self.ledger.reserved + nbytes
        return self.limits.free_space + outstanding - self.files.space(self.tree.root).free

    def make_room(self, nbytes: int, parent: bytes = b"", *, force: bool = False) -> str:
        """Room for one more block of `nbytes` on disk behind `parent`; returns "" or the reason why there is none.

        force: for the limit itself, headroom aside, pins give way too. Adopt orphans before that (`adopt.enforce`):
        they may be pinned. Raises OSError."""
        if nbytes and self.ledger.missing(nbytes) > 0 and nbytes > self.limits.limit - self.fixed:
            return "larger_than_limit"
        for missing, reason in ((self.ledger.missing, "full"), (self.space_missing, "free_space")):
            need = missing(nbytes)
            if need <= 0:
                continue
            self.collect_junk(need)
            if (need := missing(nbytes)) > 0 and reason == "full":
                self.evict(need + self.limits.limit // SLACK, self.table.slots.values(), reason, self.held(parent))
            elif need > 0:
                self._evict_for_others(need, nbytes, parent)
            if force and reason == "full":
                self._evict_held()
            if missing(nbytes) > 0:
                return reason
        return ""

    def _evict_for_others(self, need: int, nbytes: int, parent: bytes) -> None:
        """Drop blocks for the volume's free space, unless that was in vain a moment ago. Raises OSError."""
        if 0 <= self.clock() - self.vain_at < self.vain_s:  # a clock that was set back ends the wait
            return
        wanted = self.limits.limit // SLACK + (0 if self.vain_s else need)
        freed = self.evict(wanted, self.table.slots.values(), "free_space", self.held(parent))
        if 2 * (need - self.space_missing(nbytes)) >= freed:
            self.vain_s = 0.0
            return
        self.vain_at, self.vain_s = self.clock(), min(2 * self.vain_s or VAIN_S, VAIN_MOST_S)
        self.counters["evicted.in_vain"] += 1

    def make_quota(self, namespace: bytes, nbytes: int, parent: bytes) -> bool:
        """Room for `nbytes` within the quota of each of the namespace's models; False: there is none."""
        if not self.limits.quota:
            return True
        for model in self.owners(namespace):
            members = {n for n in self.table.by_namespace if model in self.owners(n)} | {namespace}
            pending = sum(r.offer.nbytes for r in self.pending.values() if r.offer.namespace in members)
            used = sum(self.table.by_namespace.get(n, 0) for n in members)
            need = used + pending + nbytes - self.limits.quota
            if need > 0:
                slots = [s for s in self.table if s.namespace in members]
                need -= self.evict(need, slots, "quota", self.held(parent))
            if need > 0:
                return False
        return True

    def collect_junk(self, need: int | None = None, of: Collection[bytes] = ()) -> int:
        """Remove foreign files and quarantined shards until `need` bytes are free (None: all), of some namespaces or of
        whatever; returns bytes freed."""
        names = [namespace.hex() for namespace in of]
        freed = 0
        for pile, counter in ((self.junk, "collected.foreign"), (self.quarantined, "collected.quarantine")):
            for path in list(pile):
                if need is not None and freed >= need:
                    break
                if names and not any(name in path for name in names):
                    continue
                try:
                    remove(self.files, path)
                except OSError:
                    self.counters["unlink_failed"] += 1
                    continue
                freed += pile.pop(path)
                self.counters[counter] += 1
        self.settle_other()
        return freed

    def evict(self, need: int, slots: Collection[Slot], reason: str, held: Collection[bytes]) -> int:
        """Drop blocks by policy until `need` bytes are free; returns bytes freed."""
        victims = plan(slots, need, held, self.table.strays(), self.limits.limit)
        return self.drop(victims, f"evicted.{reason}")

    def _evict_held(self) -> None:
        """Pins are broken, and orphans given up, only for what `du` would show over the limit."""
        pending = {r.offer.parent for r in self.pending.values()}
        if (over := self.ledger.usage().over) > 0:
            victims = plan(self.table.slots.values(), over, pending, self.table.strays(), self.limits.limit)
            self.drop(victims, FULL_PINNED)
            self.counters["pins_lost"] += self.pins.retreat({slot.chain: slot.parent for slot in victims})
        for orphan in sorted(self.orphans.values(), key=lambda o: o.mtime):
            if self.ledger.usage().over <= 0:
                break
            self.unlink(self.tree.shard(orphan.namespace, orphan.chain), orphan.disk)
            self.forget_orphan(orphan)
            self.counters["evicted.full_orphan"] += 1
            self.settle_other()

    # -- dropping ------------------------------------------------------------------------------------------------

    def drop(self, victims: Iterable[Slot], counter: str) -> int:
        """Index first, then the files; returns bytes freed. An index that fails does not keep the limit from being
        held: its rows without files are found at the next start. Counted. What a longer block has superseded has not
        departed: its tokens are stored."""
        gone = list(victims)
        freed = 0
        for at in range(0, len(gone), BATCH):
            part = gone[at : at + BATCH]
            with contextlib.suppress(IndexFailed):
                self.write_index(Batch(remove=part))
            self.files.point("mid_evict")
            for slot in part:
                self.forget(slot, departed=counter != SUPERSEDED)
                freed += self.unlink(self.tree.shard(slot.namespace, slot.chain), slot.disk)
                self.counters[counter] += 1
        self.settle_other()
        return freed

    def forget(self, slot: Slot, *, departed: bool = True) -> None:
        """departed: its tokens are not stored any more."""
        self.table.remove(slot.chain)
        self.ledger.shards -= slot.disk
        if departed:
            self.departed.add(slot.namespace, slot.chain, slot.parent)

    def forget_orphan(self, orphan: ShardFile) -> None:
        """A shard without a row is of no use, or gone. It may have had one before the index was lost."""
        del self.orphans[orphan.chain]
        self.departed.add(orphan.namespace, orphan.chain, orphan.chain)

    def unlink(self, path: str, disk: int) -> int:
        """Bytes freed; a file that cannot be removed becomes junk and stays in the ledger."""
        try:
            self.files.unlink(path)
        except FileNotFoundError:
            self.counters["vanished"] += 1
        except OSError:
            self.counters["unlink_failed"] += 1
            self.junk[path] = disk
            return 0
        return disk

    def write_index(self, batch: Batch) -> None:
        """One transaction; after a failure once more on an index opened anew. Raises IndexFailed, counted."""
        try:
            self.index.apply(batch)
            return
        except IndexFailed as problem:
            self.index_failed(problem)
        try:
            self.index.reopen()
            self.index.apply(batch)
        except IndexFailed as problem:
            self.index_failed(problem)
            raise

    def index_failed(self, problem: IndexFailed) -> None:
        self.counters[f"index.{problem.reason}"] += 1
        if problem.reason in DAMAGED_INDEX:
            self.index_lost = True

    def disk_failed(self, problem: OSError) -> None:
        """Count an error of the file system; find out whether the whole folder went away."""
        self.counters[f"io.{problem.strerror or 'error'}"] += 1
        self.probe()

    def probe(self) -> None:
        try:
            self.files.stat(self.tree.tag)
            self.offline = ""
        except OSError as problem:
            if not self.offline:
                self.counters["offline"] += 1
            self.offline = problem.strerror or "unreachable"
