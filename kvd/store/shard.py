"""Shards on disk: written from and read into buffers the caller owns, with nothing copied in between.

Workers use this module; it knows no LMDB and no mlx. Any thread may call it: all state is on the stack.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from kvd.messages import Entry
from kvd.store.files import Files, discard, read_into, write_from
from kvd.store.header import (
    LENGTH_BYTES,
    Parsed,
    ShardDamaged,
    ShardHeader,
    Tensors,
    build,
    file_bytes,
    header_bytes,
    is_header,
    offer_of,
    parse,
)
from kvd.tensorspec import TensorSpec

__all__ = [
    "Expected", "Parsed", "ShardDamaged", "ShardHeader", "ShardReader", "TensorSpec", "Tensors", "file_bytes",
    "offer_of", "open_shard", "read_header", "read_shard", "read_tensors", "store_shard", "write_shard",
]

_FIRST_READ = 16384
"""bytes: the header of a usual block in one call"""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the reader knows of the block it asked for. `tokens`: its leading token ids, as many as are known."""

    namespace: bytes
    chain: bytes
    parent: bytes
    tokens: Sequence[int]
    start: int
    tensors: tuple[TensorSpec, ...] | None = None
    """None: any layout (verify, export)"""


def write_shard(
    files: Files, path: str, header: ShardHeader, buffers: Sequence[memoryview], *, durable: bool = False
) -> tuple[int, bytes]:
    """Write a new file at `path` from the caller's buffers; returns (size in bytes, checksum).

    buffers: the tensors' bytes in the header's order. A tensor may be spread over several buffers (a pool's heads),
    a buffer never over two tensors. durable: fsynced as well. Raises OSError; ValueError for buffers that do not fit
    the header. On failure no file is left."""
    sums = [_digest(part) for part in _per_tensor(header.tensors, buffers)]
    head, checksum = build(header, sums)
    fd = files.create(path)
    try:
        size = write_from(files, fd, [memoryview(head), *buffers], 0)
        files.point("after_temp")
        if durable:
            files.fsync(fd)
        files.point("after_fsync")
    except BaseException:
        discard(files, path)
        raise
    finally:
        files.close(fd)
    return size, checksum


def store_shard(
    files: Files, temp: str, final: str, header: ShardHeader, buffers: Sequence[memoryview], *, durable: bool = True
) -> tuple[int, bytes]:
    """The worker's half of a commit: write `temp`, fsync, rename to `final`. Returns (size, checksum) for `written`.

    The block counts as stored only once the owner has answered `committed`. Raises OSError, ValueError; nothing is
    left behind then and the caller sends `abandon`."""
    size, checksum = write_shard(files, temp, header, buffers, durable=durable)
    try:
        files.rename(temp, final)
    except BaseException:
        discard(files, temp)
        raise
    files.point("after_rename")
    return size, checksum


class ShardReader:
    """An open shard whose header has been checked against what was asked; tensors are then read in file order, a few
    at a time. A context manager; one thread at a time."""

    def __init__(self, files: Files, path: str, expected: Expected, *, size: int = 0, checksum: bytes = b"") -> None:
        """size and checksum: of the index, checked if given. Raises ShardDamaged; OSError (FileNotFoundError: it
        vanished, look up once more)."""
        self._files = files
        self._path = path
        self._fd = files.open(path)
        self._next = 0
        self._at = 0
        try:
            self.parsed = _read_parsed(files, self._fd, files.stat(path).size)
            _match(self.parsed, expected, size, checksum)
        except BaseException:
            files.close(self._fd)
            raise
        self._at = self.parsed.data_at

    @property
    def header(self) -> ShardHeader:
        return self.parsed.header

    def read(self, into: Sequence[memoryview]) -> int:
        """Read the next tensors, as many as `into` has bytes for, and check them; returns how many tensors that were.

        into: as `buffers` of `write_shard`. Raises ShardDamaged (`into` then holds garbage), OSError, ValueError."""
        count = _read_tensors(self._files, self._fd, self._path, self.parsed, self._next, self._at, into)
        self._at += sum(spec.nbytes for spec in self.header.tensors[self._next : self._next + count])
        self._next += count
        return count

    def close(self) -> None:
        self._files.close(self._fd)

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_shard(
    files: Files, path: str, entry: Entry | None, expected: Expected, into: Sequence[memoryview]
) -> ShardHeader:
    """Read a whole shard straight into `into` and check every byte, as `open_shard` and `read_tensors` do in parts;
    returns its header (all of its token ids).

    Raises ShardDamaged(reason): not usable, tell the owner (`bad_shard`). OSError: FileNotFoundError means it vanished;
    any other is a miss, the shard may be fine. `into` holds garbage after either. ValueError: `into` does not fit."""
    size, checksum = (entry.size, entry.checksum) if entry else (0, b"")
    parsed = open_shard(files, path, expected, size=size, checksum=checksum)
    if parsed.header.data_bytes != sum(view.nbytes for view in into):
        raise ValueError(f"{path}: {parsed.header.data_bytes} bytes of data for other buffers")
    read_tensors(files, path, parsed, 0, into)
    return parsed.header


def open_shard(files: Files, path: str, expected: Expected, *, size: int = 0, checksum: bytes = b"") -> Parsed:
    """The header of a shard that `read_tensors` then reads in parts, checked as by `ShardReader`."""
    parsed = read_header(files, path)
    _match(parsed, expected, size, checksum)
    return parsed


def read_tensors(files: Files, path: str, parsed: Parsed, first: int, into: Sequence[memoryview]) -> int:
    """Read tensors from number `first` on, as many as `into` has bytes for, and check them; returns how many.

    The file is open only meanwhile, so that a prefix of many blocks costs no descriptors; that it is still the same is
    seen by its header. Raises as `ShardReader.read`, and FileNotFoundError where another file has taken its place."""
    fd = files.open(path)
    try:
        raw = bytearray(parsed.data_at)
        if read_into(files, fd, [memoryview(raw)], 0) != len(raw) or not is_header(bytes(raw), parsed.checksum):
            raise FileNotFoundError(errno.ENOENT, "replaced while it was read", path)
        at = parsed.data_at + sum(spec.nbytes for spec in parsed.header.tensors[:first])
        return _read_tensors(files, fd, path, parsed, first, at, into)
    finally:
        files.close(fd)


def read_header(files: Files, path: str) -> Parsed:
    """The checked header alone (rebuild, ls, verify). Raises ShardDamaged, OSError."""
    fd = files.open(path)
    try:
        return _read_parsed(files, fd, files.stat(path).size)
    finally:
        files.close(fd)


def _read_tensors(
    files: Files, fd: int, path: str, parsed: Parsed, first: int, at: int, into: Sequence[memoryview]
) -> int:
    """`at`: where tensor `first` starts in the file, in bytes."""
    tensors = parsed.header.tensors
    groups = _per_tensor(tensors[first:], into, partial=True)
    flat = [view for group in groups for view in group]
    if read_into(files, fd, flat, at) != sum(map(len, flat)):
        raise OSError(errno.EIO, "short read", path)
    for index, group in enumerate(groups, first):
        if _digest(group) != parsed.sums[index]:
            raise ShardDamaged("checksum", tensors[index].name)
    return len(groups)


def _read_parsed(files: Files, fd: int, size: int) -> Parsed:
    first = bytearray(min(size, _FIRST_READ))
    got = read_into(files, fd, [memoryview(first)], 0)
    length = header_bytes(bytes(first[: min(got, LENGTH_BYTES)]), size)
    if length > len(first):
        rest = bytearray(length - len(first))
        got += read_into(files, fd, [memoryview(rest)], len(first))
        first += rest
    if got < length:
        raise OSError(errno.EIO, "short read")
    return parse(bytes(first[:length]), size)


def _match(parsed: Parsed, expected: Expected, size: int, checksum: bytes) -> None:
    """Every doubt is a miss: the file must be the very block that was asked for."""
    header = parsed.header
    if checksum and checksum != parsed.checksum:
        raise ShardDamaged("other_version", "not the shard the index knows")
    if size and size != parsed.file_bytes:
        raise ShardDamaged("size_mismatch", f"{parsed.file_bytes} bytes, the index says {size}")
    if (header.namespace, header.chain, header.parent) != (expected.namespace, expected.chain, expected.parent):
        raise ShardDamaged("other_block")
    known = min(len(expected.tokens), len(header.tokens))
    if header.start != expected.start or header.tokens[:known] != tuple(expected.tokens[:known]):
        raise ShardDamaged("other_tokens")
    if expected.tensors is not None and header.tensors != expected.tensors:
        raise ShardDamaged("other_layout")


def _per_tensor(
    tensors: Sequence[TensorSpec], buffers: Sequence[memoryview], partial: bool = False
) -> list[list[memoryview]]:
    """Buffers grouped by the tensor they hold. partial: fewer tensors than there are is fine, half a tensor never."""
    groups: list[list[memoryview]] = []
    views: Iterator[memoryview] = iter(
        [view if view.format == "B" and view.ndim == 1 else view.cast("B") for view in buffers if view.nbytes]
    )
    for spec in tensors:
        group: list[memoryview] = []
        missing = spec.nbytes
        while missing > 0:
            view = next(views, None)
            if view is None:
                break
            group.append(view)
            missing -= len(view)
        if partial and not group:
            break
        if missing:
            raise ValueError(f"buffers do not end where tensor {spec.name} does ({missing} bytes)")
        groups.append(group)
    if next(views, None) is not None:
        raise ValueError("more buffers than tensors")
    return groups


def _digest(group: Sequence[memoryview]) -> bytes:
    if len(group) == 1:
        return xxhash.xxh3_128_digest(group[0])
    digest = xxhash.xxh3_128()
    for view in group:
        digest.update(view)
    return digest.digest()

