"""The header of a shard: a safetensors header that says whose KV this is. Pure, no I/O.

    8 bytes length (u64 LE) ‖ JSON, padded with spaces so that the data starts on a page ‖ tensor data, no holes

`__metadata__` holds: format, namespace, chain, parent (hex), tokens (decimal, comma separated), start, layout, preview,
xxh3_128 (of every tensor, hex, in file order, comma separated) and self: xxh3_128 of the whole header, length
included, with `self` as zeros. `self` is the shard's checksum in the index: through the tensor sums it covers every
byte of the file.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final

import xxhash

from kvd.cache.chain import CHAIN_BYTES, next_chain
from kvd.messages_store import Offer
from kvd.store.preview import PREVIEW
from kvd.tensorspec import TensorSpec

FORMAT: Final = "kvd-shard-1"
SUFFIX: Final = ".safetensors"
HEADER_LIMIT: Final = 1 << 20
"""bytes; nothing larger is read into memory"""
DATA_ALIGN: Final = 4096
LENGTH_BYTES: Final = 8
CHECKSUM_BYTES: Final = 16
TOKENS_LIMIT: Final = 4096
PREVIEW_LIMIT: Final = 4096
"""characters"""
_BLANK: Final = "0" * 2 * CHECKSUM_BYTES
_BEGIN: Final = '{"__metadata__":'
_DECODER: Final = json.JSONDecoder()


class ShardDamaged(Exception):
    """A shard that must not be used. `reason` is a counter's name."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class Tensors(tuple[TensorSpec, ...]):
    """The tensors of a shard in file order. Blocks of one layout and length share one of these, so what a header says
    of them is put into words once."""

    @cached_property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self)

    @cached_property
    def text(self) -> str:
        """The members of a header's JSON object that stand for them."""
        ends = [0, *itertools.accumulate(spec.nbytes for spec in self)]
        table = {
            spec.name: {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
            for spec, begin, end in zip(self, ends, ends[1:], strict=False)
        }
        return _json(table)[1:-1]

    @cached_property
    def blank_sums(self) -> str:
        """As long as the checksums of all of them."""
        return ",".join([_BLANK] * len(self))


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """What a shard says of itself. `start`: position of its first token; `layout`: the KV layout's one-line name;
    `preview`: its text, on one line, for people."""

    namespace: bytes
    chain: bytes
    parent: bytes
    tokens: tuple[int, ...]
    start: int
    layout: str
    tensors: Tensors
    preview: str = ""

    @property
    def data_bytes(self) -> int:
        return self.tensors.nbytes


@dataclass(frozen=True, slots=True)
class Parsed:
    """A header read back: data starts at byte `data_at`; `sums`: one checksum per tensor; `checksum`: the shard's."""

    header: ShardHeader
    data_at: int
    sums: tuple[bytes, ...]
    checksum: bytes

    @property
    def file_bytes(self) -> int:
        return self.data_at + self.header.data_bytes


def file_bytes(header: ShardHeader) -> int:
    """Exact size of the shard that `header` will give: what to reserve."""
    return LENGTH_BYTES + _size(_text(header, header.tensors.blank_sums)) + header.data_bytes


def offer_of(header: ShardHeader) -> Offer:
    """What a writer of this shard asks room for."""
    return Offer(
        header.namespace, header.chain, header.parent, header.tokens, header.start, file_bytes(header),
        header.preview[:PREVIEW],
    )


def build(header: ShardHeader, sums: Sequence[bytes]) -> tuple[bytes, bytes]:
    """(all bytes before the data, the shard's checksum). sums: xxh3_128 of every tensor, in order.

    Raises ValueError for a header over HEADER_LIMIT."""
    if len(sums) != len(header.tensors):
        raise ValueError(f"{len(sums)} checksums for {len(header.tensors)} tensors")
    text = _text(header, ",".join(each.hex() for each in sums))
    size = _size(text)
    raw = size.to_bytes(LENGTH_BYTES, "little") + text.ljust(size)
    checksum = xxhash.xxh3_128_digest(raw)
    blank = f'"self":"{_BLANK}"'.encode()
    return raw.replace(blank, f'"self":"{checksum.hex()}"'.encode(), 1), checksum


def _text(header: ShardHeader, sums: str) -> bytes:
    return f"{_BEGIN}{_json(_metadata(header, sums))},{header.tensors.text}}}".encode()


def _size(text: bytes) -> int:
    """Bytes of the JSON with its padding."""
    size = -(-(LENGTH_BYTES + len(text)) // DATA_ALIGN) * DATA_ALIGN - LENGTH_BYTES
    if size > HEADER_LIMIT:
        raise ValueError(f"a shard header of {size} bytes is over the limit of {HEADER_LIMIT}")
    return size


def _json(table: dict[str, Any]) -> str:
    return json.dumps(table, separators=(",", ":"), ensure_ascii=True)


def header_bytes(prefix: bytes, file_size: int) -> int:
    """Bytes before the data, from the first 8 bytes of a file. Raises ShardDamaged if that cannot be."""
    if len(prefix) < LENGTH_BYTES or file_size < LENGTH_BYTES + 2:
        raise ShardDamaged("truncated", f"{file_size} bytes")
    size = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if size > HEADER_LIMIT or size + LENGTH_BYTES > file_size:
        raise ShardDamaged("bad_header", f"claims {size} bytes of header in a file of {file_size}")
    return size + LENGTH_BYTES


def parse(raw: bytes, file_size: int) -> Parsed:
    """Check and read all bytes before the data. Allocates nothing on the word of the file.

    Raises ShardDamaged: old_format, bad_header, header_checksum, chain_mismatch, truncated."""
    try:
        text = raw[LENGTH_BYTES:].decode()
        if not text.startswith(_BEGIN):
            raise ValueError(text[:20])
        metadata, end = _DECODER.raw_decode(text, len(_BEGIN))
        fmt, own = metadata["format"], metadata["self"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ShardDamaged("bad_header", "not a header of ours") from None
    if fmt != FORMAT:
        raise ShardDamaged("old_format", repr(fmt)[:60])
    checksum = _checksum(raw, own)
    if checksum.hex() != own:
        raise ShardDamaged("header_checksum")
    try:
        header, sums = _header(metadata, _tensors(text[end:].rstrip(" ")))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, IndexError, RecursionError):
        raise ShardDamaged("bad_header", "fields do not fit") from None
    found = Parsed(header, len(raw), sums, checksum)
    if found.file_bytes != file_size:
        raise ShardDamaged("truncated", f"{file_size} bytes, the header describes {found.file_bytes}")
    if next_chain(header.parent, header.tokens) != header.chain:
        raise ShardDamaged("chain_mismatch")
    return found


def is_header(raw: bytes, checksum: bytes) -> bool:
    """Whether `raw` is everything before the data of the shard with this checksum."""
    return _checksum(raw, checksum.hex()) == checksum


def _checksum(raw: bytes, own: str) -> bytes:
    """Of a header that says its checksum is `own`: that field counts as zeros."""
    return xxhash.xxh3_128_digest(raw.replace(f'"self":"{own}"'.encode(), f'"self":"{_BLANK}"'.encode(), 1))


def _metadata(header: ShardHeader, sums: str) -> dict[str, str]:
    if not 0 < len(header.tokens) <= TOKENS_LIMIT:
        raise ValueError(f"{len(header.tokens)} tokens in a block")
    return {
        "self": _BLANK,
        "format": FORMAT,
        "namespace": header.namespace.hex(),
        "chain": header.chain.hex(),
        "parent": header.parent.hex(),
        "start": str(header.start),
        "tokens": ",".join(map(str, header.tokens)),
        "layout": header.layout,
        "preview": header.preview[:PREVIEW_LIMIT],
        "xxh3_128": sums,
    }


@lru_cache(maxsize=32)
def _tensors(rest: str) -> Tensors:
    """What follows the metadata, which is the same in all blocks of one layout and length."""
    if not rest.startswith(","):
        raise ValueError(rest[:20])
    found = []
    at = 0
    for name, entry in json.loads("{" + rest[1:]).items():
        shape = entry["shape"]
        if not all(type(n) is int and n > 0 for n in shape):
            raise ValueError(name)
        spec = TensorSpec(name, entry["dtype"], tuple(shape))
        end = at + spec.nbytes
        if entry["data_offsets"] != [at, end]:
            raise ValueError(name)
        at = end
        found.append(spec)
    return Tensors(found)


def _header(metadata: dict[str, str], tensors: Tensors) -> tuple[ShardHeader, tuple[bytes, ...]]:
    sums = tuple(bytes.fromhex(part) for part in metadata["xxh3_128"].split(","))
    ids = [bytes.fromhex(metadata[key]) for key in ("namespace", "chain", "parent")]
    tokens = tuple(int(part) for part in metadata["tokens"].split(","))
    if any(len(i) != CHAIN_BYTES for i in ids) or any(len(s) != CHECKSUM_BYTES for s in sums):
        raise ValueError("length of an id")
    if len(sums) != len(tensors) or not 0 < len(tokens) <= TOKENS_LIMIT:
        raise ValueError("counts")
    start, layout, preview = int(metadata["start"]), metadata["layout"], metadata["preview"]
    return ShardHeader(ids[0], ids[1], ids[2], tokens, start, layout, tensors, preview), sums
