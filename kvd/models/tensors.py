"""Safetensors files: headers read without their tensors, and files written one tensor at a time.

Needs only the standard library: the front sizes and fingerprints models with it.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvclient.errors import BadRequest, UnsupportedModel
from kvd.tensorspec import BITS, TensorSpec

MAX_HEADER = 100 << 20
"""bytes of a safetensors header, the limit of the reference implementation"""


def _damaged(path: Path, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"{path.name}: {reason}", file=str(path), reason=reason)


def read_specs(path: Path) -> list[TensorSpec]:
    """Tensors of one file, its sizes checked. Raises BadRequest (unreadable) or UnsupportedModel (damaged)."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER, size - 8):
                raise _damaged(path, "not a safetensors file, or truncated")
            header = file.read(length)
    except OSError as error:
        raise BadRequest(f"cannot read {path}: {error.strerror or error}", path=str(path)) from error
    try:
        return _specs(path, json.loads(header), size - 8 - length)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"damaged safetensors header ({error})") from error


def _specs(path: Path, header: dict[str, dict[str, Any]], room: int) -> list[TensorSpec]:
    specs = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape = entry["dtype"], entry["shape"]
        begin, end = (int(at) for at in entry["data_offsets"])
        if dtype not in BITS or not isinstance(shape, list):
            raise _damaged(path, f"tensor {name[:100]!r} has type {dtype!r:.40}, which is not supported")
        spec = TensorSpec(name, str(dtype), tuple(int(n) for n in shape))
        if not 0 <= begin <= end <= room or end - begin != spec.nbytes:
            raise _damaged(path, f"truncated: tensor {name[:100]!r} needs bytes {begin} to {end} of {room}")
        specs.append(spec)
    return specs


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors that one call produces together (words, scales and biases of a quantised matrix), as buffers."""

    specs: tuple[TensorSpec, ...]
    make: Callable[[], Sequence[Any]]


def write_tensors(path: Path, parts: Iterable[Part]) -> int:
    """Write a safetensors file, holding one part in memory at a time; durable on return. Returns its size."""
    parts = list(parts)
    header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    at = 0
    for spec in (spec for part in parts for spec in part.specs):
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [at, at + spec.nbytes]}
        at += spec.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for part in parts:
            for spec, data in zip(part.specs, part.make(), strict=True):
                view = memoryview(data).cast("B")
                if len(view) != spec.nbytes:
                    raise ValueError(f"{spec.name}: {len(view)} bytes made, {spec.nbytes} declared")
                file.write(view)
        file.flush()
        os.fsync(file.fileno())
    return 8 + len(raw) + at
