"""One prefix from one machine to another, as one file that is the same bytes for the same blocks of
models with the same names.

    magic ‖ u32 LE length ‖ JSON ‖ the shard files, root first ‖ SHA-256
    JSON: {namespace, models, shards: [{chain, size, checksum}]}
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Final

from kvclient.errors import BadRequest, StoreError
from kvd.store.base import Offer, Refusal, Report, Reservation, Written
from kvd.store.files import TEMP_SUFFIX, Files, discard, read_into, write_from
from kvd.store.header import HEADER_LIMIT, LENGTH_BYTES, Parsed, ShardDamaged, header_bytes, parse
from kvd.store.store import Store
from kvd.store.table import Slot
from kvd.store.upkeep import Round, check_shard

MAGIC: Final = b"kvd-export-1\n"
MANIFEST_LIMIT: Final = 64 * 1024 * 1024
PIECE: Final = 1 << 20
DIGEST: Final = 32


@dataclass(frozen=True, slots=True)
class Piece:
    """A shard inside an export: its bytes are at [offset, offset + size)."""

    chain: bytes
    size: int
    checksum: bytes
    offset: int


def export(store: Store, chain: bytes, target: str) -> Round:
    """Write the prefix that ends with block `chain` to the file `target` (replaced if there).

    Raises BadRequest: there is no such folder. StoreError: not stored, a shard is damaged, the file cannot be
    written."""
    core = store.core
    path = core.table.path(chain)[::-1]
    if not path or path[0].parent != path[0].namespace:
        raise StoreError(f"no stored prefix ends with block {chain.hex()}", chain=chain.hex())
    temp = target + TEMP_SUFFIX
    if not os.path.isdir(os.path.dirname(target)):
        raise BadRequest(f"cannot export: {os.path.dirname(target)} is no folder", path=target)
    discard(core.files, temp)
    try:
        fd = core.files.create(temp)
        try:
            size = yield from _write(store, path, fd)
            core.files.full_fsync(fd)
        finally:
            core.files.close(fd)
        core.files.rename(temp, target)
    except (OSError, ShardDamaged) as problem:
        discard(core.files, temp)
        raise StoreError(f"cannot export to {target}: {problem}", path=target) from None
    return Report(len(path), 0, {"bytes": size, "tokens": sum(s.tokens for s in path)})


def _write(store: Store, path: list[Slot], fd: int) -> Generator[tuple[int, int], None, int]:
    """Returns the size of the export in bytes."""
    core = store.core
    shards = [{"chain": s.chain.hex(), "size": s.size, "checksum": s.checksum.hex()} for s in path]
    space = path[0].namespace
    fields = {"namespace": space.hex(), "models": core.models.get(space, ()), "shards": shards}
    text = json.dumps(fields, separators=(",", ":")).encode()
    digest = hashlib.sha256()
    scratch = bytearray()
    at = 0

    def put(data: bytes | memoryview) -> int:
        digest.update(data)
        return write_from(core.files, fd, [memoryview(data)], at)

    at += put(MAGIC + len(text).to_bytes(4, "little") + text)
    for done, slot in enumerate(path, 1):
        if reason := check_shard(core, slot, scratch):
            raise ShardDamaged(reason, slot.chain.hex())
        source = core.files.open(core.tree.shard(slot.namespace, slot.chain))
        try:
            for piece in _pieces(core.files, source, 0, slot.size):
                at += put(piece)
        finally:
            core.files.close(source)
        yield done, len(path)
    write_from(core.files, fd, [memoryview(digest.digest())], at)
    return at + DIGEST


def import_(store: Store, source: str) -> Round:
    """Take in an export of a namespace that the store knows.

    Raises BadRequest: not an export, damaged, of another namespace; nothing is changed then. StoreError: no room."""
    core = store.core
    try:
        fd = core.files.open(source)
    except OSError as problem:
        raise BadRequest(f"cannot read {source}: {problem.strerror}", path=source) from None
    try:
        size = core.files.stat(source).size
        theirs, models, pieces = _manifest(core.files, fd, source, size)
        known = set(core.models) | set(core.table.by_namespace)
        if theirs not in known:
            raise BadRequest(
                f"{source} is of {' or '.join(models) or 'a model'} (namespace {theirs.hex()}), of which nothing was "
                "ever stored here: ask the model once (`kv -m NAME hello`), then import again; if that does not help, "
                "its weights, KV precision, block size or salt are others",
                theirs=theirs.hex(), models=list(models), known=sorted(n.hex() for n in known),
            )
        _verify_digest(core.files, fd, source, size)
        stored = tokens = 0
        for done, piece in enumerate(pieces, 1):
            taken, count = _take(store, fd, piece, theirs, source)
            stored += taken
            tokens += count
            yield done, len(pieces)
    except (OSError, ShardDamaged) as problem:
        raise StoreError(f"cannot import {source}: {problem}", path=source) from None
    finally:
        core.files.close(fd)
    return Report(len(pieces), 0, {"stored": stored, "already": len(pieces) - stored, "tokens": tokens})


def _take(store: Store, fd: int, piece: Piece, namespace: bytes, source: str) -> tuple[bool, int]:
    """(whether the block is new here, its tokens)."""
    core = store.core
    try:
        parsed = _parsed(core.files, fd, piece.offset, piece.size)
        if (parsed.header.namespace, parsed.header.chain, parsed.checksum) != (namespace, piece.chain, piece.checksum):
            raise ShardDamaged("other_block")
    except ShardDamaged as damage:
        raise BadRequest(f"{source}: block {piece.chain.hex()}: {damage}", path=source) from None
    head = parsed.header
    offer = Offer(namespace, head.chain, head.parent, head.tokens, head.start, piece.size, head.preview)
    place: Reservation | Refusal = Refusal("first_use")
    while isinstance(place, Refusal) and place.reason == "first_use":
        place = store.reserve(offer)
    if isinstance(place, Refusal):
        if place.stored:
            return False, len(head.tokens)
        raise StoreError(f"{source}: no room for block {head.start}: {place.reason}", reason=place.reason)
    try:
        target = core.files.create(place.temp)
        try:
            at = 0
            for data in _pieces(core.files, fd, piece.offset, piece.size):
                at += write_from(core.files, target, [data], at)
            core.files.fsync(target)
        finally:
            core.files.close(target)
        core.files.rename(place.temp, place.final)
    except OSError:
        store.abandon(place.id, "import")
        raise
    (item,) = store.commit([Written(place.id, parsed.checksum, piece.size)])
    if not item.ok:
        raise StoreError(f"{source}: block {head.start} was not committed: {item.reason}", reason=item.reason)
    return True, len(head.tokens)


def _manifest(files: Files, fd: int, source: str, size: int) -> tuple[bytes, tuple[str, ...], list[Piece]]:
    """(namespace, names of the models it had where it was exported, blocks). Raises BadRequest, OSError."""
    start = len(MAGIC) + 4
    head = _exactly(files, fd, 0, min(start, size))
    length = int.from_bytes(head[len(MAGIC) :], "little")
    if not head.startswith(MAGIC) or length > MANIFEST_LIMIT or start + length + DIGEST > size:
        raise BadRequest(f"{source} is not an export of kvd", path=source)
    try:
        manifest = json.loads(_exactly(files, fd, start, length))
        pieces = []
        at = start + length
        for item in manifest["shards"]:
            piece = Piece(bytes.fromhex(item["chain"]), int(item["size"]), bytes.fromhex(item["checksum"]), at)
            if piece.size <= 0:
                raise ValueError(piece.size)
            at += piece.size
            pieces.append(piece)
        namespace = bytes.fromhex(manifest["namespace"])
        models = tuple(str(name) for name in manifest.get("models", ()))
    except (ValueError, KeyError, TypeError):
        raise BadRequest(f"{source} is not an export of kvd", path=source) from None
    if at + DIGEST != size:
        raise BadRequest(f"{source} is cut short: {size} bytes, {at + DIGEST} expected", path=source, size=size)
    return namespace, models, pieces


def _verify_digest(files: Files, fd: int, source: str, size: int) -> None:
    digest = hashlib.sha256()
    for data in _pieces(files, fd, 0, size - DIGEST):
        digest.update(data)
    if digest.digest() != _exactly(files, fd, size - DIGEST, DIGEST):
        raise BadRequest(f"{source} is damaged: its SHA-256 does not match", path=source)


def _parsed(files: Files, fd: int, at: int, size: int) -> Parsed:
    length = header_bytes(_exactly(files, fd, at, min(LENGTH_BYTES, size)), size)
    return parse(_exactly(files, fd, at, min(length, HEADER_LIMIT + LENGTH_BYTES)), size)


def _pieces(files: Files, fd: int, at: int, size: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(PIECE, size)))
    end = at + size
    while at < end:
        view = buffer[: min(PIECE, end - at)]
        if read_into(files, fd, [view], at) != len(view):
            raise ShardDamaged("truncated")
        yield view
        at += len(view)


def _exactly(files: Files, fd: int, at: int, size: int) -> bytes:
    data = bytearray(size)
    if read_into(files, fd, [memoryview(data)], at) != size:
        raise OSError(f"{size} bytes expected at {at}")
    return bytes(data)
