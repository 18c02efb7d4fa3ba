"""What one token's KV looks like: heads, dimensions, type and precision of every layer. Pure, no mlx.

The order of `KVLayout.parts` is the order of tensors in the pool, in a block's host buffers and in a shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvclient.errors import BadRequest

Side = Literal["k", "v"]
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint32": 4}
SAFETENSORS_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint32": "U32"}
BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class Precision:
    """Affine quantisation of one side; bits 0 is native (the layout's dtype, no groups)."""

    bits: int = 0
    group: int = 0

    @property
    def native(self) -> bool:
        return self.bits == 0

    def __str__(self) -> str:
        return "native" if self.native else f"{self.bits}g{self.group}"


NATIVE = Precision()


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One attention cache: heads, elements per head of K and V, precision of each side."""

    kv_heads: int
    k_dim: int
    v_dim: int
    k: Precision = NATIVE
    v: Precision = NATIVE

    def __post_init__(self) -> None:
        for side, dim, precision in (("K", self.k_dim, self.k), ("V", self.v_dim, self.v)):
            if not precision.native:
                _check(side, dim, precision)


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a block: `[kv_heads, rows, width]` of `dtype`. name: `k.<layer>` or `k.<layer>.w/.s/.b`."""

    name: str
    layer: int
    side: Side
    dtype: str
    heads: int
    width: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one head."""
        return self.width * ITEM_BYTES[self.dtype]

    def nbytes(self, rows: int) -> int:
        return self.heads * rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class KVLayout:
    layers: tuple[LayerKV, ...]
    dtype: str
    """Native type of activations, and of scales and biases of a quantised side."""

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "float16", "bfloat16"):
            raise BadRequest(f"KV type {self.dtype} is not one of float32, float16, bfloat16", dtype=self.dtype)
        if not self.layers:
            raise BadRequest("a KV layout needs at least one layer", layers=0)

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(self._parts())

    @property
    def native(self) -> bool:
        return all(layer.k.native and layer.v.native for layer in self.layers)

    def bytes_per_token(self) -> int:
        return sum(part.nbytes(1) for part in self._parts())

    def describe(self) -> str:
        """One line that differs whenever stored bytes would: a field of the namespace and of a shard's metadata."""
        layers = ";".join(f"{x.kv_heads}x{x.k_dim}/{x.v_dim}:{x.k},{x.v}" for x in self.layers)
        return f"kv1|{self.dtype}|{layers}"

    def with_precision(self, k: Sequence[Precision], v: Sequence[Precision]) -> KVLayout:
        """The same layers at other precisions, one per layer and side. Raises BadRequest naming the constraint."""
        if len(k) != len(self.layers) or len(v) != len(self.layers):
            raise BadRequest(
                f"precision for {len(k)} K and {len(v)} V layers given, the model has {len(self.layers)}",
                layers=len(self.layers), k=len(k), v=len(v),
            )
        layers = (replace(layer, k=a, v=b) for layer, a, b in zip(self.layers, k, v, strict=True))
        return KVLayout(tuple(layers), self.dtype)

    def _parts(self) -> Iterator[Part]:
        for index, layer in enumerate(self.layers):
            yield from _side_parts(index, "k", layer.kv_heads, layer.k_dim, layer.k, self.dtype)
            yield from _side_parts(index, "v", layer.kv_heads, layer.v_dim, layer.v, self.dtype)


def _side_parts(layer: int, side: Side, heads: int, dim: int, precision: Precision, dtype: str) -> Iterator[Part]:
    name = f"{side}.{layer}"
    if precision.native:
        yield Part(name, layer, side, dtype, heads, dim)
        return
    yield Part(f"{name}.w", layer, side, "uint32", heads, dim * precision.bits // 32)
    yield Part(f"{name}.s", layer, side, dtype, heads, dim // precision.group)
    yield Part(f"{name}.b", layer, side, dtype, heads, dim // precision.group)


def head_sizes(described: str) -> list[tuple[int, int]]:
    """(k_dim, v_dim) per layer of a layout's `describe`."""
    layers = (layer.partition(":")[0].partition("x")[2].split("/") for layer in described.split("|")[2].split(";"))
    return [(int(k), int(v)) for k, v in layers]


def _check(side: str, dim: int, precision: Precision) -> None:
    if precision.bits not in BITS:
        raise BadRequest(f"{side} at {precision.bits} bits: bits must be one of {BITS}", bits=precision.bits)
    if precision.group not in GROUPS:
        raise BadRequest(f"{side} in groups of {precision.group}: must be one of {GROUPS}", group=precision.group)
    if dim % precision.group:
        raise BadRequest(
            f"{side} in groups of {precision.group}: the head size {dim} is not a multiple of the group",
            group=precision.group, head_dim=dim,
        )
    if dim * precision.bits % 32:
        raise BadRequest(f"{side} at {precision.bits} bits: a head of {dim} does not fill whole words", head_dim=dim)
