"""Small blocks for tests: deterministic bytes for any token chain."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvd.cache.chain import next_chain
from kvd.store.shard import ShardHeader, Tensors, TensorSpec

NAMESPACE = bytes(range(16))
LAYOUT = "kv1|float32|test"


def tensors(rows: int, layers: int = 2, heads: int = 2, dim: int = 8) -> Tensors:
    return Tensors(
        TensorSpec(f"{side}.{layer}", "F32", (heads, rows, dim)) for layer in range(layers) for side in ("k", "v")
    )


def header(
    tokens: Sequence[int], parent: bytes = NAMESPACE, *, namespace: bytes = NAMESPACE, start: int = 0, layers: int = 2
) -> ShardHeader:
    chain = next_chain(parent, tokens)
    return ShardHeader(
        namespace, chain, parent, tuple(tokens), start, LAYOUT, tensors(len(tokens), layers), f"words of {tokens[0]}"
    )


def payload(block: ShardHeader) -> list[memoryview]:
    """One buffer per tensor; bytes that only this chain has."""
    return [
        memoryview(bytearray(random.Random(block.chain + bytes([i % 256, i // 256])).randbytes(spec.nbytes)))
        for i, spec in enumerate(block.tensors)
    ]


def empty_like(block: ShardHeader) -> list[memoryview]:
    return [memoryview(bytearray(spec.nbytes)) for spec in block.tensors]
