"""The index of shards: rows, token ids and the order among siblings. A cache of the directory, never the truth.

    shards    chain -> row (fixed part, preview, xxh3_64 of key and row)
    tokens    chain -> token ids u32 LE, with the same checksum
    children  `cache.chain.child_keys` -> nothing: siblings in token order
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import xxhash

from kvd.cache.chain import CHAIN_BYTES, STEP, child_keys, level_key, token_bytes
from kvd.store.kv import IndexFailed, IndexFull, KeyValue, KeyValueTable, Reader, Writer
from kvd.store.table import Slot

BATCH: Final = 32
"""Rows that one transaction removes or updates at most: the pages it copies stay within the ledger's headroom."""
_ROW: Final = struct.Struct("<16s16s16sIIIQQd")
_SUM: Final = 8
_KEY: Final = CHAIN_BYTES + 4 * STEP


@dataclass(slots=True)
class Batch:
    """What one transaction changes."""

    add: list[tuple[Slot, tuple[int, ...]]] = field(default_factory=list)
    update: list[Slot] = field(default_factory=list)
    remove: list[Slot] = field(default_factory=list)
    meta: dict[str, bytes] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.add or self.update or self.remove or self.meta)


class Index:
    """All methods raise IndexFailed; after it `reopen`, and if that fails, rebuild."""

    def __init__(self, open_kv: Callable[[], KeyValue]) -> None:
        """Not open yet: `reopen`."""
        self._open = open_kv
        self._opened: KeyValue | None = None

    @property
    def _kv(self) -> KeyValue:
        if self._opened is None:
            raise IndexFailed("closed")
        return self._opened

    def reopen(self) -> None:
        """Open, or open anew: after a failed commit LMDB refuses everything until then."""
        self.close()
        self._opened = self._open()

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def pages(self) -> tuple[int, int]:
        """(bytes of pages in use, bytes of the file)"""
        return self._kv.pages()

    def copy(self, folder: str) -> None:
        """A compacted copy into an existing folder."""
        self._kv.copy(folder)

    def load(self) -> Iterator[Slot]:
        """Every row, checked."""
        with self._kv.read() as reader:
            for key, value in reader.items(KeyValueTable.SHARDS):
                yield _slot(key, value)

    def tokens(self, chain: bytes) -> tuple[int, ...]:
        with self._kv.read() as reader:
            return _tokens(reader, chain)

    def meta(self, key: str) -> bytes | None:
        with self._kv.read() as reader:
            return reader.get(KeyValueTable.META, key.encode())

    def best_child(self, parent: bytes, tokens: Sequence[int]) -> tuple[bytes, int] | None:
        """(chain, rows) of the stored child of `parent` whose first `rows` tokens are the longest match of `tokens`;
        with 0 rows in common it is still a neighbour: it tells where the prompt leaves what is stored."""
        if not tokens:
            return None
        with self._kv.read() as reader:
            return _best_child(reader, parent, tokens)

    def apply(self, batch: Batch) -> None:
        """One transaction; the map grows as needed. Nothing is changed by a failure."""
        while True:
            try:
                with self._kv.write() as writer:
                    _write(writer, batch)
                return
            except IndexFull:
                self._kv.grow()


def check(reader: Reader) -> int:
    """Walk the whole index; returns the number of rows. Raises IndexFailed at the first thing that does not fit."""
    siblings = 0
    rows = 0
    for key, value in reader.items(KeyValueTable.SHARDS):
        slot = _slot(key, value)
        keys = child_keys(slot.parent, _tokens(reader, slot.chain), slot.chain)
        if any(reader.get(KeyValueTable.CHILDREN, k) is None for k in keys):
            raise IndexFailed("damaged", "a child is missing among its siblings")
        siblings += len(keys)
        rows += 1
    found = sum(1 for _ in reader.items(KeyValueTable.CHILDREN))
    if found != siblings or sum(1 for _ in reader.items(KeyValueTable.TOKENS)) != rows:
        raise IndexFailed("damaged", f"{found} keys of children, expected {siblings}")
    return rows


def _write(writer: Writer, batch: Batch) -> None:
    for slot in batch.remove:
        if writer.get(KeyValueTable.SHARDS, slot.chain) is None:
            continue
        for key in child_keys(slot.parent, _tokens(writer, slot.chain), slot.chain):
            writer.delete(KeyValueTable.CHILDREN, key)
        writer.delete(KeyValueTable.TOKENS, slot.chain)
        writer.delete(KeyValueTable.SHARDS, slot.chain)
    for slot, tokens in batch.add:
        writer.put(KeyValueTable.SHARDS, slot.chain, _row(slot))
        writer.put(KeyValueTable.TOKENS, slot.chain, _sealed(slot.chain, token_bytes(tokens)))
        for key in child_keys(slot.parent, tokens, slot.chain):
            writer.put(KeyValueTable.CHILDREN, key, b"1")
    for slot in batch.update:
        if writer.get(KeyValueTable.SHARDS, slot.chain) is not None:
            writer.put(KeyValueTable.SHARDS, slot.chain, _row(slot))
    for name, value in batch.meta.items():
        writer.put(KeyValueTable.META, name.encode(), value)


def _best_child(reader: Reader, parent: bytes, tokens: Sequence[int]) -> tuple[bytes, int] | None:
    best: tuple[bytes, int] | None = None
    for level in range(-(-len(tokens) // STEP)):
        asked = level_key(parent, tokens, level)
        matches = [
            (level * STEP + _same(asked, key), key[_KEY:])
            for key in reader.around(KeyValueTable.CHILDREN, asked)
            if key is not None and key[:CHAIN_BYTES] == asked[:CHAIN_BYTES]
        ]
        if not matches:
            break
        rows, chain = max(matches)
        if best is None or rows > best[1]:
            best = chain, rows
        if rows < (level + 1) * STEP:
            break
    return best


def _same(asked: bytes, key: bytes) -> int:
    """Leading tokens that two keys have in common within their level (0 is the padding, not a token)."""
    left, right = array("I", asked[CHAIN_BYTES:_KEY]), array("I", key[CHAIN_BYTES:_KEY])
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        if a != b or a == 0:
            return i
    return STEP


def _row(slot: Slot) -> bytes:
    fixed = _ROW.pack(
        slot.namespace, slot.parent, slot.checksum, slot.tokens, slot.start, slot.hits, slot.size, slot.disk, slot.used
    )
    return _sealed(slot.chain, fixed + slot.preview.encode())


def _slot(key: bytes, value: bytes) -> Slot:
    raw = _opened(key, value)
    if len(raw) < _ROW.size or len(key) != CHAIN_BYTES:
        raise IndexFailed("damaged", "a row is too short")
    namespace, parent, checksum, tokens, start, hits, size, disk, used = _ROW.unpack_from(raw)
    preview = raw[_ROW.size :].decode(errors="replace")
    return Slot(namespace, bytes(key), parent, checksum, tokens, start, size, disk, hits, used, 0.0, preview)


def _tokens(reader: Reader, chain: bytes) -> tuple[int, ...]:
    value = reader.get(KeyValueTable.TOKENS, chain)
    if value is None:
        raise IndexFailed("damaged", "a row without token ids")
    raw = _opened(chain, value)
    if len(raw) % 4:
        raise IndexFailed("damaged", "token ids cut short")
    return struct.unpack(f"<{len(raw) // 4}I", raw)


def _sealed(key: bytes, raw: bytes) -> bytes:
    return raw + xxhash.xxh3_64_digest(key + raw)


def _opened(key: bytes, value: bytes) -> bytes:
    raw = value[:-_SUM]
    if xxhash.xxh3_64_digest(key + raw) != value[-_SUM:]:
        raise IndexFailed("damaged", "a row's checksum")
    return raw

