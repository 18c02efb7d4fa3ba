"""From SSD to memory: reader threads put shards straight into the pool's reserved rows and check every byte there."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvd.messages import Entry
from kvd.store.files import Files
from kvd.store.shard import Expected, ShardDamaged, read_shard

VANISHED: Final = "vanished"
READ_FAILED: Final = "read_failed"


@dataclass(frozen=True, slots=True)
class Order:
    """Read one shard. `ticket` and `index` come back with the result. `into`: memory of the block's tensors, in order,
    that nothing else touches until the result is there."""

    ticket: int
    index: int
    entry: Entry
    expected: Expected
    into: Sequence[memoryview]


@dataclass(frozen=True, slots=True)
class BlockRead:
    """`reason` empty: `into` holds the block and `tokens` are its ids. Otherwise it holds garbage: `damaged` says the
    shard itself is bad, else only this reading failed."""

    ticket: int
    index: int
    tokens: tuple[int, ...] = ()
    nbytes: int = 0
    seconds: float = 0.0
    reason: str = ""
    damaged: bool = False


class Readers:
    """Threads that read shards in parallel. `done` is called on one of them for every order, in any order."""

    def __init__(self, files: Files, done: Callable[[BlockRead], None], threads: int = 2) -> None:
        self.files = files
        self._done = done
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=f"reader-{n}", daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, order: Order) -> None:
        self._orders.put(order)

    def close(self) -> None:
        for _ in self._threads:
            self._orders.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            self._done(read(self.files, order))


def read(files: Files, order: Order) -> BlockRead:
    """Carry out one order. Never raises for what the file is or does."""
    began = time.monotonic()
    try:
        header = read_shard(files, order.entry.path, order.entry, order.expected, order.into)
    except ShardDamaged as problem:
        return BlockRead(order.ticket, order.index, reason=problem.reason, damaged=True)
    except FileNotFoundError:
        return BlockRead(order.ticket, order.index, reason=VANISHED)
    except OSError:
        return BlockRead(order.ticket, order.index, reason=READ_FAILED)
    return BlockRead(
        order.ticket, order.index, header.tokens, header.data_bytes, time.monotonic() - began
    )
