"""Reading a GGUF file: header, metadata, tensor directory, raw tensor bytes.

Every count and length is checked against a limit and against the bytes left in the file before anything
of that size is allocated, so a damaged or hostile file costs an error and nothing else.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvclient.errors import BadRequest, UnsupportedModel
from kvd.models.gguf.types import OTHER_NAMES, READABLE, TensorType

MAX_ENTRIES = 1 << 16
"""metadata entries, and tensors, that a file may have"""
MAX_ARRAY = 1 << 22
"""elements of one metadata array (a vocabulary has a few hundred thousand)"""
MAX_STRING = 1 << 20
"""bytes of one metadata string (a chat template has some 10 KB)"""
MAX_NAME = 256
MAX_DIMENSIONS = 4
MAX_ELEMENTS = 1 << 40

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies. `shape` is row-major: the last dimension is contiguous."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    """bytes from the start of the file"""

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.type.block * self.type.size

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True)
class GGUF:
    """A parsed header. Metadata values are plain Python numbers, strings, booleans and lists of them."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        with self.path.open("rb", buffering=0) as file:
            yield file

    def read(self, file: BinaryIO, tensor: TensorInfo) -> bytearray:
        """The raw blocks of one tensor. Raises UnsupportedModel if the file shrank meanwhile."""
        data = bytearray(tensor.nbytes)
        view, at = memoryview(data), 0
        file.seek(tensor.offset)
        while at < len(data):
            got = file.readinto(view[at:])  # type: ignore[attr-defined]
            if not got:
                raise refuse(self.path, f"truncated inside tensor {tensor.name}")
            at += got
        return data


def refuse(path: Path, reason: str, **details: Any) -> UnsupportedModel:
    """The error to raise. Names out of the file may be anything: nothing in it can drive a terminal, or fill it."""
    reason = "".join(character if character.isprintable() else "?" for character in reason[:300])
    return UnsupportedModel(f"{path.name}: {reason}", file=str(path), reason=reason, **details)


class _Cursor:
    """Little-endian reads that never go past the end of the file."""

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self.file, self.path, self.size, self.at = file, path, size, 0

    def take(self, count: int) -> bytes:
        data = self.file.read(count) if count <= self.size - self.at else b""
        if len(data) != count:
            raise refuse(self.path, f"truncated: {count} bytes wanted at {self.at}, the file has {self.size}")
        self.at += count
        return data

    def numbers(self, form: str, count: int) -> tuple[Any, ...]:
        layout = struct.Struct(f"<{count}{form}")
        return layout.unpack(self.take(layout.size))

    def number(self, form: str) -> Any:
        return self.numbers(form, 1)[0]

    def bounded(self, form: str, limit: int, what: str) -> int:
        value = int(self.number(form))
        if value > limit:
            raise refuse(self.path, f"damaged: {what} is {value}, at most {limit} are possible")
        return value

    def text(self, limit: int = MAX_STRING) -> str:
        raw = self.take(self.bounded("Q", limit, "a string's length"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            # A few vocabularies hold half a character; the byte-level mapping of those never needs it.
            return raw.decode("utf-8", "replace")

    def value(self, kind: int, nested: bool = False) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY and not nested:
            inner = int(self.number("I"))
            count = self.bounded("Q", MAX_ARRAY, "an array's length")
            if inner in _SCALARS:
                return list(self.numbers(_SCALARS[inner], count))
            return [self.value(inner, nested=True) for _ in range(count)]
        raise refuse(self.path, f"damaged: metadata of unknown type {kind}")


def read_gguf(path: Path) -> GGUF:
    """Parse the header of `path`. Raises BadRequest (cannot be opened) or UnsupportedModel (what it is instead)."""
    try:
        with path.open("rb") as file:
            return _parse(_Cursor(file, path, os.fstat(file.fileno()).st_size))
    except OSError as error:
        raise BadRequest(f"cannot read {path}: {error.strerror or error}", path=str(path)) from error


def _parse(cursor: _Cursor) -> GGUF:
    path = cursor.path
    if cursor.size < 24 or cursor.take(4) != b"GGUF":
        raise refuse(path, "not a GGUF file")
    version = cursor.number("I")
    if version not in (2, 3):
        known = "big-endian" if version in (2 << 24, 3 << 24) else f"version {version}"
        raise refuse(path, f"GGUF {known} is not supported, versions 2 and 3 (little-endian) are")
    tensor_count = cursor.bounded("Q", MAX_ENTRIES, "the number of tensors")
    entry_count = cursor.bounded("Q", MAX_ENTRIES, "the number of metadata entries")
    metadata: dict[str, Any] = {}
    for _ in range(entry_count):
        key = cursor.text(MAX_NAME)
        metadata[key] = cursor.value(cursor.number("I"))
    if metadata.get("split.count", 0) > 1:
        raise refuse(path, f"one of {metadata['split.count']} parts of a split GGUF; join them first")
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise refuse(path, f"damaged: alignment {alignment!r} is not a power of two")
    entries = [_tensor_entry(cursor) for _ in range(tensor_count)]
    start = -(-cursor.at // alignment) * alignment
    return GGUF(path, metadata, {info.name: info for info in (_placed(cursor, start, entry) for entry in entries)})


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text(MAX_NAME)
    rank = cursor.bounded("I", MAX_DIMENSIONS, f"the rank of tensor {name}")
    shape = tuple(reversed(cursor.numbers("Q", rank)))
    return name, shape, cursor.number("I"), cursor.number("Q")


def _placed(cursor: _Cursor, start: int, entry: tuple[str, tuple[int, ...], int, int]) -> TensorInfo:
    name, shape, number, offset = entry
    kind = READABLE.get(number)
    if kind is None:
        label = OTHER_NAMES.get(number, f"number {number}")
        raise refuse(cursor.path, f"tensor {name} has type {label}, which is not supported", tensor_type=label)
    if not shape or 0 in shape or math.prod(shape) > MAX_ELEMENTS or shape[-1] % kind.block:
        raise refuse(cursor.path, f"damaged: tensor {name} has the impossible shape {shape} for {kind.name}")
    info = TensorInfo(name, shape, kind, start + offset)
    if info.offset + info.nbytes > cursor.size:
        raise refuse(
            cursor.path,
            f"truncated: tensor {name} ends at byte {info.offset + info.nbytes}, the file has {cursor.size}",
        )
    return info
