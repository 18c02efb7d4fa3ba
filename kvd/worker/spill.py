"""From memory to SSD in the background: finished blocks are written while the engine computes on.

The life of a block here: offered -> reserve asked -> reserved -> written (temp, fsync, rename) -> committed. Only the
front's `committed` makes it durable. What is refused or dropped is counted by reason and stays in memory only.

A GPU waits between two chunks while their blocks are offered: the engine only holds their rows and notes them, the
rest is up to two threads: one asks, the other writes. A write that hangs keeps no block from being asked for, so the
front knows of all that are on their way.
"""

from __future__ import annotations

import errno
import itertools
import queue
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from typing import Final

import structlog

from kvd.cache.hostmem import HostBlock
from kvd.cache.layout import SAFETENSORS_NAMES, KVLayout
from kvd.cache.prefix import PrefixIndex
from kvd.cache.results import Published
from kvd.messages import Abandon, Committed, Departed, Reserve, Reserved, Written
from kvd.store.base import FIRST_USE, STORED
from kvd.store.files import Files
from kvd.store.shard import ShardHeader, Tensors, TensorSpec, offer_of, store_shard
from kvd.worker.outbox import Outbox

REMEMBERED: Final = 1 << 18
"""chains known to be durable, or noted; forgetting one costs a refused reserve, or that its first use counts twice"""


log = structlog.get_logger()


class State(Enum):
    UNKNOWN = "unknown"
    NOTED = "noted"
    """refused at its first use: to be offered again by another request only"""
    PENDING = "pending"
    DURABLE = "durable"


@dataclass(slots=True)
class _Job:
    """nbytes: of its rows. The header is made when the reserve is asked."""

    block: Published
    text: Callable[[], str]
    host: HostBlock
    nbytes: int
    header: ShardHeader | None = None
    reservation: Reserved | None = None

    @property
    def chain(self) -> bytes:
        return self.block.chain


class Spill:
    """Thread-safe. The engine offers, the link's thread reports answers, one thread of its own asks, another writes."""

    def __init__(
        self,
        files: Files,
        layout: KVLayout,
        outbox: Outbox,
        settled: Callable[[bytes], None],
        *,
        max_pending: int,
    ) -> None:
        """`settled(chain)` is called on any thread when a pending block became durable or will not. `max_pending` bytes
        of blocks may wait for the disk; beyond it they are dropped from this queue, never waited for."""
        self._files = files
        self._described = layout.describe()
        self._row_bytes = layout.bytes_per_token()
        self._tensors = tensors_by_rows(layout)
        self._outbox = outbox
        self._settled = settled
        self._max_pending = max_pending
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._asked: dict[int, _Job] = {}
        self._written: dict[int, _Job] = {}
        self._pending: dict[bytes, _Job] = {}
        self._durable: OrderedDict[bytes, None] = OrderedDict()
        self._noted: OrderedDict[bytes, None] = OrderedDict()
        self._to_ask: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._to_write: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self.pending_bytes = 0
        self.counters: Counter[str] = Counter()
        threading.Thread(target=self._run, args=(self._to_ask, self._ask), name="spill-ask", daemon=True).start()
        threading.Thread(target=self._run, args=(self._to_write, self._write), name="spill-write", daemon=True).start()

    def state(self, chain: bytes) -> State:
        with self._lock:
            if chain in self._pending:
                return State.PENDING
            if chain in self._durable:
                return State.DURABLE
            return State.NOTED if chain in self._noted else State.UNKNOWN

    def offer(
        self, block: Published, text: Callable[[], str], host: Callable[[Published], HostBlock | None]
    ) -> bool:
        """Write `block` and its `text` unless it is stored or on its way. False: dropped (`counters` says why). `host`
        is called on this thread, only if the block is to be written; it returns None for a block that memory has
        lost, and raises OSError for one that the device does not give out. `text` is called on the asking thread."""
        if self.state(block.chain) in (State.PENDING, State.DURABLE):
            return True
        nbytes = self._row_bytes * len(block.tokens)
        with self._lock:
            if self.pending_bytes + nbytes > self._max_pending:
                self.counters["slow_disk"] += 1
                return False
        try:
            bytes_of = host(block)
        except OSError:
            self.counters["copy_failed"] += 1
            return False
        if bytes_of is None:
            self.counters["evicted"] += 1
            return False
        job = _Job(block, text, bytes_of, nbytes)
        with self._lock:
            self.pending_bytes += nbytes
            self._pending[block.chain] = job
            self._noted.pop(block.chain, None)
        self._to_ask.put(job)
        return True

    def known(self, chains: Sequence[bytes], hits: int) -> None:
        """A lookup found the first `hits` of `chains` in the store; the rest are not there (any more)."""
        with self._lock:
            for place, chain in enumerate(chains):
                if place < hits:
                    _remember(self._durable, chain)
                else:
                    self._durable.pop(chain, None)

    def forget(self, chains: Sequence[bytes]) -> None:
        """These are not in the store after all, as far as is known: they may be offered again."""
        with self._lock:
            for chain in chains:
                self._durable.pop(chain, None)

    def departed(self, message: Departed, memory: PrefixIndex) -> None:
        """The front dropped these blocks, and with them what was covered by one: shorter blocks behind the same parent,
        which are offered again if memory still has them. In the order of the front's other messages, on the engine's
        thread."""
        covered = [e.chain for parent in message.parents for e in memory.children(parent) if not e.full]
        with self._lock:
            if message.everything:
                self._durable.clear()
        self.forget((*message.chains, *covered))

    def reserved(self, answer: Reserved) -> None:
        """The front's answer to a Reserve."""
        with self._lock:
            job = self._asked.pop(answer.q, None)
        if job is None:
            return
        if answer.ok:
            job.reservation = answer
            self._to_write.put(job)
        else:
            self._end(job, answer.reason)

    def committed(self, answer: Committed) -> None:
        """What the front made durable, or did not."""
        for item in answer.items:
            with self._lock:
                job = self._written.pop(item.reservation, None)
            if job is not None:
                self._end(job, "" if item.ok else item.reason)

    def _run(self, jobs: queue.SimpleQueue[_Job], act: Callable[[_Job], None]) -> None:
        while True:
            job = jobs.get()
            try:
                act(job)
            except Exception as problem:  # the border of one block: the others are written
                log.error("not stored", chain=job.chain.hex(), exc_info=problem)
                if job.reservation is not None:
                    self._outbox.tell(Abandon(job.reservation.reservation, "write_failed"))
                self._end(job, "write_failed")

    def _ask(self, job: _Job) -> None:
        block, text = job.block, job.text()
        job.header = header = ShardHeader(
            block.namespace, block.chain, block.parent, block.tokens, block.start, self._described,
            self._tensors(len(block.tokens)), text,
        )  # fmt: skip
        number = next(self._numbers)
        with self._lock:
            self._asked[number] = job
        self._outbox.tell(Reserve(number, offer_of(header)))

    def _write(self, job: _Job) -> None:
        place = job.reservation
        assert place is not None and job.header is not None
        try:
            size, checksum = store_shard(
                self._files, place.temp, place.final, job.header, job.host.buffers(), durable=place.durable
            )
        except OSError as problem:
            reason = "no_space" if problem.errno in (errno.ENOSPC, errno.EDQUOT) else "write_failed"
            self._outbox.tell(Abandon(place.reservation, reason))
            self._end(job, reason)
            return
        job.host.release()
        with self._lock:
            self._written[place.reservation] = job
        self._outbox.tell(Written(place.reservation, checksum, size))

    def _end(self, job: _Job, reason: str) -> None:
        job.host.release()
        stored = not reason or reason in STORED
        with self._lock:
            self._pending.pop(job.chain, None)
            self.pending_bytes -= job.nbytes
            self.counters[reason or "stored"] += 1
            if stored:
                _remember(self._durable, job.chain)
            elif reason == FIRST_USE:
                _remember(self._noted, job.chain)
        self._settled(job.chain)


def _remember(chains: OrderedDict[bytes, None], chain: bytes) -> None:
    chains[chain] = None
    chains.move_to_end(chain)
    if len(chains) > REMEMBERED:
        chains.popitem(last=False)


def tensors_by_rows(layout: KVLayout) -> Callable[[int], Tensors]:
    """`tensor_specs` of a layout: blocks of as many rows share one."""
    return cache(partial(tensor_specs, layout))


def tensor_specs(layout: KVLayout, rows: int) -> Tensors:
    """The tensors of a block of `rows` rows, in the layout's order."""
    return Tensors(
        TensorSpec(part.name, SAFETENSORS_NAMES[part.dtype], (part.heads, rows, part.width)) for part in layout.parts
    )
