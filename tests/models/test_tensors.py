from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvclient.errors import BadRequest, UnsupportedModel
from kvd.models.tensors import MAX_HEADER, Part, read_specs, write_tensors
from kvd.tensorspec import TensorSpec

A, B = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(4, dtype=np.float16)


def header(content: Any, body: bytes = b"") -> bytes:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(raw)) + raw + body


def test_what_is_written_is_what_others_read(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    specs = TensorSpec("a", "F32", (2, 3)), TensorSpec("b", "F16", (4,))
    size = write_tensors(path, [Part(specs, lambda: (A, B))])
    found = load_file(path)
    assert np.array_equal(found["a"], A) and np.array_equal(found["b"], B)
    assert size == path.stat().st_size
    assert read_specs(path) == list(specs)


def test_a_part_of_another_size_than_declared_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="8 bytes made, 12 declared"):
        write_tensors(tmp_path / "m", [Part((TensorSpec("a", "F32", (3,)),), lambda: (B,))])


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": A}, path)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(UnsupportedModel, match="truncated"):
            read_specs(path)


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changes}


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", MAX_HEADER + 1) + b"{" * 100,
        header(b"{" * 64),
        header(b"[" * 100_000),
        header([1]),
        header({"a": 1}),
        header(entry(dtype="Q9"), b"0000"),
        header(entry(shape=[2]), b"0000"),
        header(entry(shape=["x"]), b"0000"),
        header(entry(data_offsets=[4, 0]), b"0000"),
        header(entry(data_offsets=[-4, 0]), b"0000"),
        header(entry(data_offsets=[0]), b"0000"),
        header(entry(shape=[1 << 62, 1 << 62]), b"0000"),
    ],
)
def test_damaged_headers_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(UnsupportedModel):
        read_specs(path)


def test_a_missing_file_is_a_bad_request(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="cannot read"):
        read_specs(tmp_path / "none")
