"""Quantised products of a decode batch on CUDA: all rows in one product.

A decode step has inputs [rows, 1, width]. MLX 0.32.4 takes the first dimension for a batch there, and reads the weights
once for each row; as [1, rows, width] it reads them once for all. Its other backends see to that themselves.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear


class RowsTogether(QuantizedLinear):
    """A QuantizedLinear for which a step's rows are rows of one product."""

    def __call__(self, x: mx.array) -> mx.array:
        return _together(super().__call__, x)


class EmbeddingRowsTogether(QuantizedEmbedding):
    """The same for an embedding that is the output layer as well."""

    def as_linear(self, x: mx.array) -> mx.array:
        return _together(super().as_linear, x)


def put_together(model: Any) -> int:
    """Let every quantised layer of `model` take rows together; returns how many there are."""
    kinds: dict[Any, Any] = {QuantizedLinear: RowsTogether, QuantizedEmbedding: EmbeddingRowsTogether}
    found = [module for _, module in model.named_modules() if type(module) in kinds]
    for module in found:
        module.__class__ = kinds[type(module)]
    return len(found)


def _together(product: Any, x: mx.array) -> mx.array:
    if x.ndim != 3 or x.shape[1] != 1 or x.shape[0] == 1:
        out: mx.array = product(x)
        return out
    rows = product(x.reshape(1, x.shape[0], x.shape[2]))
    result: mx.array = rows.reshape(x.shape[0], 1, rows.shape[2])
    return result
