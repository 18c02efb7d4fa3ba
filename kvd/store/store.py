"""The store's owner: look up, reserve, commit, evict.

One process at a time (a lock in the folder) and in it one thread, the one that called `open` (asserted). Synchronous:
no call waits for anything but the disk. Workers write and read the shards themselves, see `shard`.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from kvclient.errors import StoreError
from kvd.store import commit, lookup, opening, reserve
from kvd.store.adopt import adopt, enforce, quarantine_file, rebuild_index
from kvd.store.base import CommittedItem, Found, Limits, Offer, Refusal, Reservation, Written
from kvd.store.core import Core
from kvd.store.departed import Departure
from kvd.store.files import Files, RealFiles, replace_whole
from kvd.store.index import Batch, Index
from kvd.store.kv import IndexFailed, KeyValue, LmdbKeyValue
from kvd.store.lock import StoreLock
from kvd.store.notes import Notes
from kvd.store.pins import Pin
from kvd.store.tree import Tree

ADOPT_STEP = 64
"""orphans per `tend`"""


class Store:
    """Open with `Store.open`. No OSError leaves it: errors of the disk become a refusal, a miss or StoreError."""

    def __init__(self, core: Core, lock: StoreLock) -> None:
        self._core = core
        self._lock = lock
        self._thread = threading.get_ident()
        self._notes = Notes(core)
        self._closed = False

    @classmethod
    def open(
        cls, folder: str | os.PathLike[str], limits: Limits, files: Files | None = None, *,
        clock: Callable[[], float] = time.time, open_kv: Callable[[str, bool], KeyValue] | None = None,
    ) -> Store:
        """Take the lock, bring index and folder together, enforce the limit. Opens no shard unless the index is lost.

        Raises StoreError: in use (details: pid), a folder with files of others, or one that cannot be used."""
        files = files or RealFiles()
        tree = Tree(os.path.abspath(folder))

        def make() -> KeyValue:
            if open_kv:
                return open_kv(tree.index, limits.durable)
            return LmdbKeyValue(tree.index, sync=limits.durable)

        core = Core(files, tree, limits, clock, Index(make))
        lock = None
        try:
            opening.make_root(core)
            lock = StoreLock(os.path.join(tree.root, "lock"))
            opening.make_folders(core)
            opening.fill(core)
        except (OSError, IndexFailed) as problem:
            core.index.close()
            if lock:
                lock.release()
            raise StoreError(f"the store {tree.root} cannot be opened: {problem}", path=tree.root) from None
        return cls(core, lock)

    @property
    def core(self) -> Core:
        """For the parts of the store in other modules (ls, verify, export, …)."""
        self._mine()
        return self._core

    # -- reading -------------------------------------------------------------------------------------------------

    def lookup(self, namespace: bytes, chains: Sequence[bytes], parent: bytes, tail: Sequence[int]) -> Found:
        """What is stored of a prompt that goes on behind `parent` (its namespace at the start) with the token ids
        `tail`, whose full blocks have `chains`."""
        return lookup.lookup(self.core, namespace, chains, parent, tail)

    def touched(self, namespace: bytes, chains: Iterable[bytes]) -> None:
        """Blocks that were used: they count a hit and are the most recent now."""
        core = self.core
        for chain in chains:
            if slot := core.table.get(namespace, chain):
                self._notes.use(slot)

    # -- writing -------------------------------------------------------------------------------------------------

    def reserve(self, offer: Offer) -> Reservation | Refusal:
        """Room for one shard of exactly `offer.nbytes` (`header.file_bytes`). Every reservation ends in `commit` or
        `abandon`."""
        if self._closed:
            return Refusal("closed")
        return reserve.reserve(self.core, offer)

    def commit(self, written: Iterable[Written]) -> list[CommittedItem]:
        """All shards that workers have finished: one sync of their folders, one transaction. Durable on return where
        `ok`; otherwise the file is removed."""
        self._mine()
        return commit.commit(self._core, list(written))

    def abandon(self, reservation: int, reason: str) -> None:
        """The writer gave up, or died: whatever it left is removed."""
        core = self.core
        found = core.pending.pop(reservation, None)
        if found is None:
            core.counters["unknown_reservation"] += 1
            return
        core.counters[f"abandoned.{reason}"] += 1
        commit.give_up(core, found)

    def quarantine(self, namespace: bytes, chain: bytes, reason: str) -> None:
        """A reader found a shard that does not check out, or not at all (`vanished`): a miss from now on."""
        core = self.core
        slot = core.table.get(namespace, chain)
        if slot is None:
            return
        path = core.tree.shard(namespace, chain)
        core.probe()
        if core.offline or (reason == "vanished" and self._there(path)):
            return
        with contextlib.suppress(IndexFailed):
            core.write_index(Batch(remove=[slot]))
        core.forget(slot)
        quarantine_file(core, path, slot.disk, reason)
        core.settle_other()

    def departed(self) -> tuple[Departure, ...]:
        """Blocks that left since the last call: what counts as stored in a worker's memory must not go on doing so."""
        return self.core.departed.take()

    # -- pins and labels -----------------------------------------------------------------------------------------

    def pin(self, namespace: bytes, chains: Sequence[bytes], ttl_s: float | None = None) -> Pin:
        """Hold the deepest stored block of `chains` and the path from it to the root, for `ttl_s` seconds or for ever.

        Raises StoreError: none of them is stored, or the pin cannot be written."""
        core = self.core
        stored = [c for c in chains if core.table.get(namespace, c)]
        if not stored:
            raise StoreError("nothing of this prefix is stored: there is nothing to pin", chains=len(chains))
        now = core.clock()
        pin = Pin(namespace, stored[-1], None if ttl_s is None else now + ttl_s, now)
        with self._as_store_error("pin"):
            core.pins.add(pin)
        return pin

    def unpin(self, chain: bytes) -> bool:
        """False if it was not pinned. Raises StoreError."""
        core = self.core
        with self._as_store_error("unpin"):
            return core.pins.remove(chain)

    def label(self, namespace: bytes, model: str) -> None:
        """Remember a model that a namespace belongs to: for `ls`, quotas and import. Raises StoreError."""
        core = self.core
        names = core.models.get(namespace, ())
        if model in names:
            return
        core.models[namespace] = tuple(sorted((*names, model)))
        text = json.dumps({n.hex(): m for n, m in sorted(core.models.items())}, indent=1).encode()
        with self._as_store_error("label"):
            replace_whole(core.files, core.tree.small("names.json"), text, core.limits.durable)

    # -- life ----------------------------------------------------------------------------------------------------

    def tend(self) -> bool:
        """Housekeeping, to be called about once a second: adopt orphans, expire pins, write hits, keep the free space.
        True: there is more to do, call again soon."""
        core = self.core
        if core.offline:
            core.probe()
            if core.offline:
                return False
        if core.limits.off:
            return False
        try:
            if core.index_lost:
                rebuild_index(core)
            if core.orphans:
                adopt(core, list(core.orphans.values())[:ADOPT_STEP])
            core.counters["pins_expired"] += core.pins.expire(core.clock())
            self._notes.tend()
            core.measure()
            enforce(core)
        except OSError as problem:
            core.disk_failed(problem)
        except IndexFailed as problem:
            core.counters[f"tend.{problem.reason}"] += 1
        return bool(core.orphans) and not core.offline

    def gone(self) -> str:
        """Why the folder is not what was opened (deleted, replaced, unmounted), so that the store must be opened again;
        "" while it is."""
        tree = self.core.tree
        if self._lock.lost:
            return f"{tree.root} was deleted, replaced or unmounted"
        for path in (tree.tag, *tree.folders):
            try:
                self.core.files.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                return f"{path} is gone"
            except OSError:
                return ""
        return ""

    def set_limits(self, limits: Limits) -> None:
        """Change limits while running; a lower one is enforced before this returns, 0 switches the store off (`durable`
        needs a restart)."""
        core = self.core
        core.limits = limits
        if limits.off:
            core.departed.all()
        core.ledger.limit = limits.limit
        try:
            enforce(core)
        except OSError as problem:
            core.disk_failed(problem)
        except IndexFailed as problem:
            core.counters[f"limits.{problem.reason}"] += 1

    def close(self) -> None:
        """Give up what is pending, write hits and wear, mark the index as closed in order, release the lock. Of a
        folder that is gone nothing is touched: what has its name may be another."""
        if self._closed:
            return
        core = self.core
        if self.gone():
            self._closed = True
            core.index.close()
            self._lock.release()
            return
        for reservation in list(core.pending):
            self.abandon(reservation, "closed")
        try:
            self._notes.flush()
            self._notes.save_sightings()
            core.index.close()
            replace_whole(core.files, core.tree.small("wear.json"), core.wear.pack(), core.limits.durable)
            if not core.index_lost:
                opening.mark_clean(core)
        except (OSError, IndexFailed):
            core.counters["close_failed"] += 1
        finally:
            self._closed = True
            core.index.close()
            self._lock.release()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def stats(self) -> dict[str, Any]:
        """Plain numbers for `status` and `kvd cache stats`; bytes unless named otherwise."""
        from kvd.store.listing import stats

        return stats(self.core)

    def _there(self, path: str) -> bool:
        try:
            self._core.files.stat(path)
        except OSError:
            return False
        return True

    def _mine(self) -> None:
        assert threading.get_ident() == self._thread, "the store belongs to the thread that opened it"

    @contextlib.contextmanager
    def _as_store_error(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            self._core.disk_failed(problem)
            raise StoreError(f"cannot {what}: {problem.strerror}", path=self._core.tree.root) from None
