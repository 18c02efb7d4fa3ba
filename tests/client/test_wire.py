"""Frames: what is a message, and what garbage becomes."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvclient import wire
from kvclient.errors import ProtocolError
from kvclient.wire import Message, message, new_id, parse

HEADER = {"v": wire.VERSION, "t": "status", "id": "r1"}


def test_a_message_survives_its_frames() -> None:
    sent = message("generate", new_id(), {"prompt": "hi", "bytes": b"\x00"}, "demo")
    back = parse(sent.frames())
    assert back == sent and back.body == {"prompt": "hi", "bytes": b"\x00"}


@pytest.mark.parametrize("frames", [
    [], [b""], [b"", b""], [b"x", b"y", b"z"], [msgpack.packb([1]), b""], [msgpack.packb({}), b""], [b"\xc1", b""],
    [msgpack.packb({**HEADER, "id": 5}), b""], [msgpack.packb({**HEADER, "id": ""}), b""],
    [msgpack.packb({**HEADER, "id": "x" * 65}), b""], [msgpack.packb({**HEADER, "t": 5}), b""],
    [msgpack.packb({**HEADER, "m": 5}), b""], [msgpack.packb({**HEADER, "x": "y" * wire.MAX_HEADER}), b""],
    [msgpack.packb(HEADER) + b"trailing", b""], [b"\xdf\xff\xff\xff\xff", b""], [b"\x91" * 4000, b""],
])  # fmt: skip
def test_garbage_is_a_protocol_error(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        parse(frames)


@pytest.mark.parametrize("version", [0, 2, None, "1", 1.5])
def test_another_version_names_both_and_the_request(version: object) -> None:
    with pytest.raises(ProtocolError) as refused:
        parse([msgpack.packb({**HEADER, "v": version}), b""])
    assert refused.value.details == {"theirs": version, "ours": wire.VERSION, "id": "r1"}


@pytest.mark.parametrize("packed", [b"", b"\xc1", msgpack.packb(5), msgpack.packb({1: 2}), b"\xdd\xff\xff\xff\xff"])
def test_a_body_that_is_no_map_is_a_protocol_error(packed: bytes) -> None:
    with pytest.raises(ProtocolError):
        _ = Message("status", "r1", packed).body


def test_an_oversized_body_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_BODY", 10)
    with pytest.raises(ProtocolError) as refused:
        parse([msgpack.packb(HEADER), bytes(11)])
    assert refused.value.details == {"size": 11, "limit": 10}


@given(st.lists(st.binary(max_size=60), max_size=4))
def test_random_frames_never_raise_anything_else(frames: list[bytes]) -> None:
    try:
        _ = parse(frames).body
    except ProtocolError:
        return
