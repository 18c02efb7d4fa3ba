"""The door to LMDB: four tables, transactions, neighbours of a key. `faults.FaultyKeyValue` is its faulty twin.

The owner is the only process that opens it and uses it from one thread, never holding a read transaction over a write,
so LMDB runs without its lock file: nothing is left locked by an owner that was killed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from enum import Enum
from typing import Any, Final, Protocol

import lmdb

SCHEMA: Final = b"1"
MAP_FIRST: Final = 16 * 1024 * 1024
"""bytes of address space, doubled on demand; the file is only as large as its pages"""


class KeyValueTable(Enum):
    SHARDS = b"shards"
    TOKENS = b"tokens"
    CHILDREN = b"children"
    META = b"meta"


class IndexFailed(Exception):
    """The index cannot be used or written; `reason` is a counter's name. It can be rebuilt from the shards."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class IndexFull(IndexFailed):
    """The map is full: `grow` and try again."""


class Reader(Protocol):
    def get(self, table: KeyValueTable, key: bytes) -> bytes | None: ...
    def items(self, table: KeyValueTable) -> Iterator[tuple[bytes, bytes]]: ...
    def around(self, table: KeyValueTable, key: bytes) -> tuple[bytes | None, bytes | None]:
        """(the last key before `key`, the first key at or after it)"""


class Writer(Reader, Protocol):
    def put(self, table: KeyValueTable, key: bytes, value: bytes) -> None: ...
    def delete(self, table: KeyValueTable, key: bytes) -> None: ...


class KeyValue(Protocol):
    """What the index needs of LMDB. All but `close` raise IndexFailed."""

    def read(self) -> contextlib.AbstractContextManager[Reader]: ...
    def write(self) -> contextlib.AbstractContextManager[Writer]:
        """Committed on leaving, aborted by an exception. Raises IndexFull, IndexFailed."""

    def grow(self) -> None: ...
    def pages(self) -> tuple[int, int]:
        """(bytes of pages in use, bytes of the file)"""

    def copy(self, folder: str) -> None:
        """A compacted copy into an existing folder."""

    def close(self) -> None: ...


@contextlib.contextmanager
def typed() -> Iterator[None]:
    """LMDB's errors as ours."""
    try:
        yield
    except lmdb.MapFullError as problem:
        raise IndexFull("map_full", str(problem)) from None
    except lmdb.Error as problem:
        raise IndexFailed(type(problem).__name__, str(problem)) from None


class LmdbTransaction:
    """`Reader` and `Writer` on one LMDB transaction."""

    def __init__(self, transaction: Any, tables: dict[KeyValueTable, Any]) -> None:
        self._transaction = transaction
        self._tables = tables

    def get(self, table: KeyValueTable, key: bytes) -> bytes | None:
        value: bytes | None = self._transaction.get(key, db=self._tables[table])
        return value

    def items(self, table: KeyValueTable) -> Iterator[tuple[bytes, bytes]]:
        return iter(self._transaction.cursor(self._tables[table]))

    def around(self, table: KeyValueTable, key: bytes) -> tuple[bytes | None, bytes | None]:
        with self._transaction.cursor(self._tables[table]) as cursor:
            after = bytes(cursor.key()) if cursor.set_range(key) else None
            before = bytes(cursor.key()) if (cursor.prev() if after is not None else cursor.last()) else None
        return before, after

    def put(self, table: KeyValueTable, key: bytes, value: bytes) -> None:
        self._transaction.put(key, value, db=self._tables[table])

    def delete(self, table: KeyValueTable, key: bytes) -> None:
        self._transaction.delete(key, db=self._tables[table])


class LmdbKeyValue:
    """`KeyValue` on an LMDB environment in `folder`."""

    def __init__(self, folder: str, *, sync: bool = True, readonly: bool = False) -> None:
        """sync: every commit reaches the drive. Raises IndexFailed: damaged, of an older schema, not readable."""
        self._folder = folder
        size = max(MAP_FIRST, 2 * _file_bytes(folder))
        with typed():
            self._env = lmdb.open(
                folder, map_size=size, max_dbs=len(KeyValueTable), lock=False, sync=sync, metasync=sync, mode=0o600,
                readonly=readonly, create=not readonly, max_spare_txns=0,
            )
        try:
            with typed():
                self._tables = {t: self._env.open_db(t.value, create=not readonly) for t in KeyValueTable}
            self._check_schema(readonly)
        except IndexFailed:
            self._env.close()
            raise

    @contextlib.contextmanager
    def read(self) -> Iterator[Reader]:
        with typed(), self._env.begin() as transaction:
            yield LmdbTransaction(transaction, self._tables)

    @contextlib.contextmanager
    def write(self) -> Iterator[Writer]:
        with typed(), self._env.begin(write=True) as transaction:
            yield LmdbTransaction(transaction, self._tables)

    def grow(self) -> None:
        with typed():
            self._env.set_mapsize(2 * self._env.info()["map_size"])

    def pages(self) -> tuple[int, int]:
        with typed(), self._env.begin() as transaction:
            stats = [self._env.stat(), *(transaction.stat(db) for db in self._tables.values())]
        used = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)
        return used * stats[0]["psize"], _file_bytes(self._folder)

    def copy(self, folder: str) -> None:
        with typed():
            self._env.copy(folder, compact=True)

    def check_pages(self) -> None:
        """Walk every page and account for the free ones, as a compacting copy does. Raises IndexFailed."""
        fd = os.open(os.devnull, os.O_WRONLY)
        try:
            with typed():
                self._env.copyfd(fd, compact=True)
        finally:
            os.close(fd)

    def close(self) -> None:
        self._env.close()

    def _check_schema(self, readonly: bool) -> None:
        with self.read() as reader:
            found = reader.get(KeyValueTable.META, b"schema")
            empty = found is None and next(reader.items(KeyValueTable.SHARDS), None) is None
        if empty and not readonly:
            with self.write() as writer:
                writer.put(KeyValueTable.META, b"schema", SCHEMA)
        elif found != SCHEMA:
            raise IndexFailed("schema", f"{found!r}, this version writes {SCHEMA!r}")


def _file_bytes(folder: str) -> int:
    try:
        return os.stat(os.path.join(folder, "data.mdb")).st_size
    except FileNotFoundError:
        return 0
