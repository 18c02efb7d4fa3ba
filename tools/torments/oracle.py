"""What must be true whatever happens: bytes right, acknowledged blocks there, the limit held, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvd.store.base import Limits
from kvd.store.store import Store
from torments.actor import Actor, WrongBytes

HANG_S = 30
PAGE = os.sysconf("SC_PAGE_SIZE")
"""of the index"""


@dataclass(slots=True)
class Outcome:
    """Counts of one campaign. The four that must stay 0 come first."""

    name: str
    wrong_bytes: int = 0
    lost: int = 0
    hangs: int = 0
    over_limit: int = 0
    leaks: int = 0
    runs: int = 0
    samples: int = 0
    acknowledged: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not (self.wrong_bytes or self.lost or self.hangs or self.over_limit or self.leaks or self.failures)

    def sample(self, folder: str, limit: int) -> None:
        """Is `du` under the limit now?"""
        self.samples += 1
        used = du(folder)
        if used > limit:
            self.over_limit += 1
            self.failures.append(f"du {used} > limit {limit}")

    def fail(self, what: str) -> None:
        self.failures.append(what)

    @contextlib.contextmanager
    def run(self, what: str, limit_s: int = HANG_S) -> Iterator[None]:
        """One run: a hang (longer than `limit_s`) or wrong bytes in it is counted, anything unexpected too."""
        self.runs += 1
        try:
            with deadline(limit_s):
                yield
        except WrongBytes as problem:
            self.wrong_bytes += 1
            self.fail(f"{what}: wrong bytes: {problem}")
        except TimeoutError:
            self.hangs += 1
            self.fail(f"{what}: hang")
        except Exception as problem:  # noqa: BLE001  a campaign reports every kind of failure and goes on
            self.fail(f"{what}: {type(problem).__name__}: {problem}")

    def plain(self) -> dict[str, Any]:
        return {
            "name": self.name, "runs": self.runs, "wrong_bytes": self.wrong_bytes, "lost": self.lost,
            "hangs": self.hangs, "over_limit": self.over_limit, "leaks": self.leaks, "samples": self.samples,
            "acknowledged": self.acknowledged, "counts": dict(self.counts), "failures": self.failures[:20],
            "ok": self.ok,
        }


@contextlib.contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """TimeoutError in the main thread after `seconds`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def du(folder: str) -> int:
    """Bytes on disk below and including `folder`, every file once, as `du -s` counts."""
    seen: dict[int, int] = {}
    for path, _, names in os.walk(folder):
        for name in (".", *names):
            with contextlib.suppress(FileNotFoundError):
                found = os.lstat(os.path.join(path, name))
                seen[found.st_ino] = found.st_blocks * 512
    return sum(seen.values())


def room(nbytes: int) -> int:
    """A limit under which as many blocks fit whatever pages the system has, which the index takes: 16 KiB on a Mac."""
    return nbytes + 19 * (PAGE - 4096)


@contextlib.contextmanager
def place() -> Iterator[str]:
    """An empty folder, in memory where the machine has such a place: campaigns sync thousands of times."""
    shm = Path("/dev/shm")
    base = str(shm) if shm.is_dir() and os.access(shm, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="kvd", dir=base) as folder:
        yield folder


def fds() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/dev/fd"))


def crash(store: Store) -> None:
    """End an owner as a kill would, inside this process: nothing is written, the kernel lets go of the lock."""
    store._core.index.close()
    store._lock.release()


def aftermath(
    outcome: Outcome, folder: str, limits: Limits, kept: Sequence[Sequence[int]], what: str
) -> None:
    """Open as after a crash and check everything: what was acknowledged and held, leftovers, the limit, every byte."""
    with Store.open(folder, limits) as store:
        outcome.sample(folder, limits.limit)
        while store.tend():
            pass
        actor = Actor(store)
        for tokens in kept:
            outcome.acknowledged += 1
            if (rows := actor.get(tokens)) != len(tokens):
                outcome.lost += 1
                outcome.fail(f"{what}: {rows} of {len(tokens)} acknowledged tokens are there")
        for leaf in [s for s in store.core.table if s.chain not in store.core.table.children]:
            check_path(actor, leaf.chain)
        outcome.counts += Counter({k: n for k, n in store.core.counters.items() if n > 0})
        leftovers(outcome, store, what)
        outcome.sample(folder, limits.limit)


def check_path(actor: Actor, chain: bytes) -> None:
    """Read a whole stored path; a miss is fine, wrong bytes are not."""
    core = actor.store.core
    path = core.table.path(chain)[::-1]
    if path and path[0].parent == path[0].namespace:
        actor.get([t for slot in path for t in core.index.tokens(slot.chain)], touch=False)


def leftovers(outcome: Outcome, store: Store, what: str) -> None:
    """Temporary files, unknown shards, bytes the ledger does not know: none."""
    core = store.core
    if names := os.listdir(core.tree.tmp):
        outcome.leaks += 1
        outcome.fail(f"{what}: left in tmp: {names}")
    on_disk = {f"{p.parent.name}/{p.stem}" for p in Path(core.tree.blocks).glob("*/*")}
    known = {f"{s.namespace.hex()}/{s.chain.hex()}" for s in core.table}
    if on_disk != known:
        outcome.leaks += 1
        outcome.fail(f"{what}: {len(on_disk - known)} files without a row, {len(known - on_disk)} rows without a file")
    if core.ledger.reserved or core.pending or core.by_chain:
        outcome.leaks += 1
        outcome.fail(f"{what}: reservations left")
    if core.ledger.shards != core.table.bytes:
        outcome.leaks += 1
        outcome.fail(f"{what}: ledger {core.ledger.shards}, shards {core.table.bytes}")
