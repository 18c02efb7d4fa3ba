"""Faulty twins of the doors to files and to LMDB: one implementation for the tests and `tools/torture`.

`Faults` decides, the twins obey: the Nth call of a kind fails once or for good, calls are slow, the disk full or gone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvd.store.files import Files, Item, RealFiles, Space
from kvd.store.kv import IndexFailed, IndexFull, KeyValue, KeyValueTable, Reader, Writer

FILE_CALLS: Final = (
    "open", "create", "preadv", "pwritev", "fsync", "full_fsync", "fsync_dir", "full_fsync_dir", "rename", "unlink",
    "mkdir", "list", "stat", "touch", "space",
)
KV_CALLS: Final = ("kv.open", "kv.get", "kv.put", "kv.delete", "kv.items", "kv.around", "kv.commit")
FILE_ERRORS: Final = ("ENOSPC", "EIO", "EMFILE", "short")
KV_ERRORS: Final = ("ENOSPC", "EIO", "MapFullError", "CorruptedError")


@dataclass(slots=True)
class Faults:
    """Fail the `nth` call of kind `call` with `error`, and with `forever` all later ones too. "short" makes reads and
    writes return half. `capacity`: bytes that may still be written before ENOSPC; `gone`: the volume was unmounted."""

    call: str = ""
    nth: int = 1
    error: str = "EIO"
    forever: bool = False
    delay_s: float = 0.0
    capacity: int | None = None
    gone: bool = False
    calls: Counter[str] = field(default_factory=Counter)
    fired: int = 0

    def hit(self, call: str) -> bool:
        """Count a call; raise if it is to fail; True: it is to be short."""
        self.calls[call] += 1
        if self.delay_s:
            time.sleep(self.delay_s)
        if self.gone and not call.startswith("kv."):
            raise OSError(errno.ENOENT, "no such volume")
        if call != self.call or self.calls[call] < self.nth or (self.calls[call] > self.nth and not self.forever):
            return False
        self.fired += 1
        if self.error == "short":
            return True
        if call.startswith("kv."):
            raise IndexFull("map_full") if self.error == "MapFullError" else IndexFailed(self.error)
        raise OSError(getattr(errno, self.error), os.strerror(getattr(errno, self.error)))

    def take(self, nbytes: int) -> None:
        if self.capacity is not None:
            if nbytes > self.capacity:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.capacity -= nbytes


class FaultyFiles:
    """`Files` that obeys `faults`."""

    def __init__(self, faults: Faults, inner: Files | None = None) -> None:
        self.faults = faults
        self._inner = inner or RealFiles()

    def open(self, path: str) -> int:
        self.faults.hit("open")
        return self._inner.open(path)

    def create(self, path: str) -> int:
        self.faults.hit("create")
        return self._inner.create(path)

    def close(self, fd: int) -> None:
        self._inner.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        short = self.faults.hit("preadv")
        return self._inner.preadv(fd, _half(buffers) if short else buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        buffers = _half(buffers) if self.faults.hit("pwritev") else buffers
        self.faults.take(sum(len(view) for view in buffers))
        return self._inner.pwritev(fd, buffers, offset)

    def uncached(self, fd: int) -> None:
        self._inner.uncached(fd)

    def fsync(self, fd: int) -> None:
        self.faults.hit("fsync")
        self._inner.fsync(fd)

    def full_fsync(self, fd: int) -> None:
        self.faults.hit("full_fsync")
        self._inner.full_fsync(fd)

    def fsync_dir(self, path: str) -> None:
        self.faults.hit("fsync_dir")
        self._inner.fsync_dir(path)

    def full_fsync_dir(self, path: str) -> None:
        self.faults.hit("full_fsync_dir")
        self._inner.full_fsync_dir(path)

    def rename(self, source: str, target: str) -> None:
        self.faults.hit("rename")
        self._inner.rename(source, target)

    def unlink(self, path: str) -> None:
        self.faults.hit("unlink")
        self._inner.unlink(path)

    def mkdir(self, path: str) -> None:
        self.faults.hit("mkdir")
        self._inner.mkdir(path)

    def rmdir(self, path: str) -> None:
        self.faults.hit("rmdir")
        self._inner.rmdir(path)

    def list(self, path: str) -> list[Item]:
        self.faults.hit("list")
        return self._inner.list(path)

    def stat(self, path: str) -> Item:
        self.faults.hit("stat")
        return self._inner.stat(path)

    def touch(self, path: str, mtime: float) -> None:
        self.faults.hit("touch")
        self._inner.touch(path, mtime)

    def space(self, path: str) -> Space:
        self.faults.hit("space")
        found = self._inner.space(path)
        return found if self.faults.capacity is None else Space(self.faults.capacity, found.total)

    def point(self, name: str) -> None:
        self._inner.point(name)


def _half(buffers: Sequence[memoryview]) -> list[memoryview]:
    return [buffers[0][: max(1, len(buffers[0]) // 2)]]


class FaultyTransaction:
    """`Reader` and `Writer` that obey `faults`."""

    def __init__(self, inner: Writer, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def get(self, table: KeyValueTable, key: bytes) -> bytes | None:
        self._faults.hit("kv.get")
        return self._inner.get(table, key)

    def items(self, table: KeyValueTable) -> Iterator[tuple[bytes, bytes]]:
        self._faults.hit("kv.items")
        return self._inner.items(table)

    def around(self, table: KeyValueTable, key: bytes) -> tuple[bytes | None, bytes | None]:
        self._faults.hit("kv.around")
        return self._inner.around(table, key)

    def put(self, table: KeyValueTable, key: bytes, value: bytes) -> None:
        self._faults.hit("kv.put")
        self._inner.put(table, key, value)

    def delete(self, table: KeyValueTable, key: bytes) -> None:
        self._faults.hit("kv.delete")
        self._inner.delete(table, key)


class FaultyKeyValue:
    """`KeyValue` that obeys `faults`."""

    def __init__(self, faults: Faults, inner: Callable[[], KeyValue]) -> None:
        faults.hit("kv.open")
        self._faults = faults
        self._inner = inner()

    @contextlib.contextmanager
    def read(self) -> Iterator[Reader]:
        with self._inner.read() as reader:
            yield FaultyTransaction(reader, self._faults)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def write(self) -> Iterator[Writer]:
        with self._inner.write() as writer:
            yield FaultyTransaction(writer, self._faults)
            self._faults.hit("kv.commit")

    def grow(self) -> None:
        if self._faults.error == "MapFullError" and self._faults.forever:
            raise IndexFailed("MapFullError", "cannot grow")
        self._inner.grow()

    def pages(self) -> tuple[int, int]:
        return self._inner.pages()

    def copy(self, folder: str) -> None:
        self._inner.copy(folder)

    def close(self) -> None:
        self._inner.close()
