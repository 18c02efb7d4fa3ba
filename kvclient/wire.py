"""The wire protocol, defined once: clients, front and workers all import this file.

A message is two frames: a small msgpack header and a msgpack body, so that the front forwards a body without
reading it. `PROTOCOL.md` beside this file is the prose.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from kvclient.errors import ProtocolError

VERSION: Final = 1
MAX_HEADER: Final = 4096
"""bytes"""
MAX_BODY: Final = 64 * 1024 * 1024
"""bytes; ZMQ_MAXMSGSIZE is set to it"""
BEAT_S: Final = 1.0
"""Every live request gets some event at least this often (seconds)."""

TERMINAL: Final = frozenset({"done", "error", "result"})
"""Kinds after which no more replies with that id come."""


@dataclass(frozen=True, slots=True)
class Message:
    """`kind` is a verb in requests ("generate", "status", …) and an event kind in replies. `body` stays packed."""

    kind: str
    id: str
    packed: bytes
    model: str = ""
    version: int = VERSION

    @property
    def body(self) -> dict[str, Any]:
        return unpack(self.packed)

    def frames(self) -> list[bytes]:
        header = {"v": self.version, "t": self.kind, "id": self.id}
        if self.model:
            header["m"] = self.model
        return [msgpack.packb(header), self.packed]


def message(kind: str, id: str, body: dict[str, Any] | None = None, model: str = "") -> Message:
    return Message(kind, id, pack(body or {}), model)


def parse(frames: list[bytes]) -> Message:
    """Header checked, body untouched. Raises ProtocolError for anything that is not a message of ours; a version
    other than ours is an error that names both, with `details["id"]` where the header has one so it can be answered."""
    if len(frames) != 2:
        raise ProtocolError(f"a message has 2 frames, got {len(frames)}", frames=len(frames))
    head, packed = frames
    if len(head) > MAX_HEADER:
        raise ProtocolError("header too large", size=len(head), limit=MAX_HEADER)
    if len(packed) > MAX_BODY:
        raise ProtocolError("message too large", size=len(packed), limit=MAX_BODY)
    header = unpack(head)
    id = header.get("id")
    version = header.get("v")
    if not isinstance(id, str) or not 0 < len(id) <= 64:
        raise ProtocolError("request id missing or longer than 64 characters")
    if version != VERSION:
        raise ProtocolError(f"protocol {version} is not spoken here, {VERSION} is", theirs=version, ours=VERSION, id=id)
    kind, model = header.get("t"), header.get("m", "")
    if not isinstance(kind, str) or not isinstance(model, str):
        raise ProtocolError("header fields have the wrong type", id=id)
    return Message(kind, id, packed, model)


def pack(value: dict[str, Any]) -> bytes:
    data: bytes = msgpack.packb(value, use_bin_type=True)
    return data


def unpack(data: bytes) -> dict[str, Any]:
    """A body. Raises ProtocolError for anything but a map with text keys."""
    try:
        value = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as problem:
        raise ProtocolError(f"not msgpack: {type(problem).__name__}") from None
    if not isinstance(value, dict):
        raise ProtocolError(f"expected a map, got {type(value).__name__}")
    return value


def new_id() -> str:
    """A request id: unique over all clients, so that cancel needs nothing else."""
    return uuid.uuid4().hex
