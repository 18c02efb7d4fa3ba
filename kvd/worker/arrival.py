"""A restore on its way: all blocks' first layers, then all blocks' next ones, so that compute can start behind them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

import structlog

from kvd.cache.layout import KVLayout
from kvd.messages import Entry
from kvd.store.files import Files
from kvd.store.shard import Expected, Parsed, ShardDamaged, open_shard, read_tensors

VANISHED: Final = "vanished"
READ_FAILED: Final = "read_failed"
log = structlog.get_logger()
GROUP_BYTES: Final = 2 << 20
"""of a full block that are read at once. Against whole blocks of 11.8 MB from a cold page cache, medians: 0.4 MB 1.24
times the time, 0.8 MB 1.14, 1.6 and 2.4 MB 1.09, 4 MB 1; from a warm one as fast from 1.6 MB on."""


class Unfinished(Exception):
    """Layers that a pass waits for failed, or do not come while the engine may wait. What it computed is no use."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that are read together: those below `layers` that no group before has; `tensors` of a shard hold them."""

    layers: int
    tensors: slice


def layer_groups(layout: KVLayout, block_size: int, nbytes: int | None = None) -> tuple[Group, ...]:
    """The fewest layers at a time that have `nbytes` (default: GROUP_BYTES) in a block of `block_size` tokens."""
    least = GROUP_BYTES if nbytes is None else nbytes
    groups, size, first, parts = list[Group](), 0, 0, layout.parts
    for number, part in enumerate(parts, 1):
        size += part.nbytes(block_size)
        if number == len(parts) or (size >= least and parts[number].layer != part.layer):
            groups.append(Group(part.layer + 1, slice(first, number)))
            size, first = 0, number
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class Order:
    """One shard to read. `into(tensors)` opens memory of those tensors, in order, that nothing else touches; what is in
    it when that is left without an error counts."""

    entry: Entry
    expected: Expected
    into: Callable[[slice], AbstractContextManager[Sequence[memoryview]]]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a block did not come. `damaged`: the shard itself is bad; else only this reading failed."""

    reason: str
    damaged: bool = False


class Arrival:
    """Reader threads carry out its pieces (one group of one block); one thread waits for them and takes the results."""

    def __init__(
        self, orders: Sequence[Order], groups: Sequence[Group], news: threading.Condition, *, each: bool = False
    ) -> None:
        """`news` is notified of every piece. each: the engine is told of every piece; else of every group."""
        self.orders = tuple(orders)
        self.groups = tuple(groups)
        self.failures: dict[int, Failure] = {}
        self.landed: deque[tuple[int, int]] = deque()
        """(block, group) of the pieces that are in memory, checked; whoever has work with them takes them from here"""
        self.nbytes = 0
        self._news = news
        self._each = each
        self._parsed: list[Parsed | None] = [None] * len(self.orders)
        self._left = [len(self.orders)] * len(self.groups)
        self._missing = [len(self.groups)] * len(self.orders)
        self.stopped = False
        """what had not come is not waited for any more, and not begun"""
        self._group_of = [at for at, group in enumerate(self.groups) for _ in range(self._first(at), group.layers)]
        self._began = self._last = time.monotonic()

    # --- readers

    def path(self, block: int) -> str:
        return self.orders[block].entry.path

    @property
    def missing(self) -> Iterator[int]:
        """Blocks of which a piece has not come."""
        return (block for block, pieces in enumerate(self._missing) if pieces)

    def read(self, files: Files, group: int, block: int) -> bool:
        """Carry out one piece. Never raises for what the file is or does. True: the engine is to be told."""
        failure = None
        if block not in self.failures:
            failure = self._fill(files, group, block)
        with self._news:
            if failure is not None:
                self.failures.setdefault(block, failure)
            elif block not in self.failures:
                self.landed.append((block, group))
            self._left[group] -= 1
            self._missing[block] -= 1
            self._last = time.monotonic()
            self._news.notify_all()
            return self._each or not self._left[group]

    def _fill(self, files: Files, group: int, block: int) -> Failure | None:
        order, tensors = self.orders[block], self.groups[group].tensors
        path, entry, parsed = order.entry.path, order.entry, self._parsed[block]
        try:
            if parsed is None:
                parsed = open_shard(files, path, order.expected, size=entry.size, checksum=entry.checksum)
                self._parsed[block] = parsed
            with order.into(tensors) as views:
                read_tensors(files, path, parsed, tensors.start, views)
                nbytes = sum(view.nbytes for view in views)
        except ShardDamaged as problem:
            return Failure(problem.reason, damaged=True)
        except FileNotFoundError:
            return Failure(VANISHED)
        except OSError:
            return Failure(READ_FAILED)
        except Exception as problem:  # noqa: BLE001  the border of a reader: its requests would wait for ever
            log.error("reading a shard failed", path=path, error=f"{type(problem).__name__}: {problem}")
            return Failure(READ_FAILED)
        with self._news:
            self.nbytes += nbytes
        return None

    # --- the engine

    @property
    def done(self) -> bool:
        """Every piece was carried out, or it was stopped; `failures` says which blocks did not come."""
        return self.stopped or not any(self._left)

    @property
    def seconds(self) -> float:
        """From the order to the last piece so far."""
        return self._last - self._began

    @property
    def remaining_s(self) -> float:
        """Seconds until the last piece, at the pace of those that came."""
        left = sum(self._left)
        came = len(self.orders) * len(self.groups) - left
        return (time.monotonic() - self._began) * left / came if came else float("inf")

    def there(self, layer: int) -> bool:
        """Whether this layer of all blocks is in memory."""
        return not self._left[self._group_of[layer]] and not self.failures

    def wait(self, layer: int, patience: Callable[[], float]) -> None:
        """Until this layer of all blocks is in memory. patience(): seconds that may still be waited, asked anew at all
        `news`. Raises Unfinished."""
        with self._news:
            while not self.there(layer):
                if self.failures:
                    raise Unfinished("a block did not come")
                if (seconds := patience()) <= 0:
                    raise Unfinished("the engine is wanted elsewhere")
                self._news.wait(seconds)

    def stop(self) -> None:
        """Blocks of which a piece is missing have failed; a reader may still be at one of them."""
        with self._news:
            self.stopped = True
            for block in self.missing:
                self.failures.setdefault(block, Failure(READ_FAILED))

    def tokens(self, block: int) -> tuple[int, ...]:
        """Token ids of a block that came."""
        parsed = self._parsed[block]
        assert parsed is not None
        return parsed.header.tokens

    def _first(self, group: int) -> int:
        return self.groups[group - 1].layers if group else 0
