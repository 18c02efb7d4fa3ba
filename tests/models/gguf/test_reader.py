import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvclient.errors import BadRequest, KvdError, UnsupportedModel
from kvd.models.gguf import types
from kvd.models.gguf.reader import MAX_ARRAY, read_gguf
from tests.models.gguf.files import float_tensor, gguf_bytes, text

METADATA = {
    "general.architecture": "llama", "a.flag": True, "a.number": 7, "a.negative": -3, "a.real": 0.5,
    "a.texts": ["x", "Ġy"], "a.numbers": [1, 2, 3],
}  # fmt: skip
WEIGHT = np.arange(64, dtype=np.float32).reshape(2, 32)
WHOLE = gguf_bytes(METADATA, {"w": float_tensor(types.F32, WEIGHT), "v": float_tensor(types.F16, WEIGHT[0])})


def parsed(tmp_path: Path, content: bytes) -> object:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    return read_gguf(path)


def test_metadata_shapes_and_bytes_come_back(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(WHOLE)
    gguf = read_gguf(path)
    assert gguf.metadata == METADATA
    assert gguf.tensors["w"].shape == (2, 32)
    with gguf.open() as file:
        assert np.array_equal(np.frombuffer(gguf.read(file, gguf.tensors["w"]), np.float32).reshape(2, 32), WEIGHT)
        assert np.array_equal(np.frombuffer(gguf.read(file, gguf.tensors["v"]), np.float16), WEIGHT[0])


def test_every_truncation_is_refused_as_such(tmp_path: Path) -> None:
    for size in range(len(WHOLE)):
        with pytest.raises(UnsupportedModel, match="truncated|not a GGUF"):
            parsed(tmp_path, WHOLE[:size])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_headers_cost_an_error_at_most(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    content = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(WHOLE) - 257))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content)
    try:
        read_gguf(path)
    except KvdError as error:
        assert error.exit_code == 65


ONE_ARRAY = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<I", 9)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not a GGUF"),
        (b"PK\x03\x04" + b"\0" * 40, "not a GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "number of tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "number of metadata"),
        (ONE_ARRAY + struct.pack("<IQ", 4, MAX_ARRAY + 1), "array's length"),
        (ONE_ARRAY + struct.pack("<IQ", 4, MAX_ARRAY), "truncated"),
        (ONE_ARRAY + struct.pack("<IQ", 9, 1), "unknown type"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 62), "string's length"),
        (gguf_bytes({"split.count": 3}, {}), "one of 3 parts"),
        (gguf_bytes({"general.alignment": 3}, {}), "alignment"),
        (gguf_bytes({}, {"w": (types.Q4_0, (2, 33), b"")}), "impossible shape"),
        (gguf_bytes({}, {"w": (types.F32, (1 << 20, 1 << 20), b"")}), "truncated: tensor w"),
        (gguf_bytes({}, {"w": (types.F32, (1 << 40, 1 << 40), b"")}), "impossible shape"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        parsed(tmp_path, content)


def test_a_length_is_checked_before_anything_of_it_is_allocated(tmp_path: Path) -> None:
    content = ONE_ARRAY + struct.pack("<IQ", 12, MAX_ARRAY)
    tracemalloc.start()
    try:
        with pytest.raises(UnsupportedModel, match="truncated"):
            parsed(tmp_path, content)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_an_unsupported_tensor_type_is_named(tmp_path: Path) -> None:
    content = gguf_bytes({}, {"blk.0.w": float_tensor(types.F16, WEIGHT)})
    at = content.index(b"blk.0.w") + 7 + 4 + 16
    content = content[:at] + struct.pack("<I", 20) + content[at + 4 :]
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.w has type IQ4_NL"):
        parsed(tmp_path, content)


def test_names_from_the_file_cannot_drive_a_terminal(tmp_path: Path) -> None:
    name = "\x1b[2J\n\u202e" + "x" * 200
    content = gguf_bytes({}, {name: (types.F32, (1 << 40, 1 << 40), b"")})
    with pytest.raises(UnsupportedModel, match="impossible shape") as caught:
        parsed(tmp_path, content)
    assert caught.value.message.isprintable() and len(caught.value.message) < 400


def test_a_missing_file_is_a_bad_request(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="cannot read .*No such file"):
        read_gguf(tmp_path / "none.gguf")
