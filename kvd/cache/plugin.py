"""What an mlx-lm model sees instead of its own cache: per layer an object over the pool, and one hook for attention.

The run path returns plain arrays from `update_and_fetch`, so the model's own attention runs as it is. Other paths
return an opaque pair from a cache that has `bits`: mlx-lm then calls `quantized_scaled_dot_product_attention` through
its module's globals, and that one name is replaced here, once, whatever the import order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models.cache import create_attention_mask

from kvd.cache.pool import KVPool

Attend = Callable[[mx.array, float, Any], mx.array]


class Step(Protocol):
    """One forward pass, planned: where rows are written and how each layer attends."""

    offset: int | mx.array
    """position of the first new token, or one per row of the batch"""
    opaque: bool

    def fetch(self, layer: int, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Write the new rows of one layer; return what attention needs."""
        ...


class LayerCache:
    """Stands for mlx-lm's KVCache in one layer. Has no state of its own: the step has it."""

    def __init__(self, pool: KVPool, layer: int) -> None:
        self.pool = pool
        self.layer = layer
        self.step: Step | None = None
        self.keys: Any = None
        self.values: Any = None
        self.windowed = False
        """whether the model asked for a sliding window, which a plain cache does not apply to decode batches"""

    @property
    def offset(self) -> int | mx.array:
        assert self.step is not None
        return self.step.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        assert self.step is not None
        return self.step.fetch(self.layer, keys, values)

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        assert self.step is not None
        self.windowed = self.windowed or window_size is not None
        offset = self.step.offset
        if not isinstance(offset, int):
            return None
        return create_attention_mask(n, offset=offset, return_array=return_array, window_size=window_size)

    def size(self) -> int | mx.array:
        return self.offset

    def empty(self) -> bool:
        return False

    def is_trimmable(self) -> bool:
        return False


class OpaqueLayerCache(LayerCache):
    """The same with `bits`, which sends mlx-lm's attention through the hook."""

    bits = 0
    group_size = 0


class OpaqueKV:
    """In place of keys and values: knows how to attend."""

    def __init__(self, attend: Attend) -> None:
        self.attend = attend


def install_hook() -> None:
    """Let opaque keys attend by themselves; everything else goes to mlx-lm's function. Idempotent."""
    original = base.quantized_scaled_dot_product_attention
    if getattr(original, "kvd_hook", False):
        return

    def attention(
        queries: mx.array, q_keys: Any, q_values: Any, scale: float, mask: Any, group_size: int = 64, bits: int = 8
    ) -> mx.array:
        if isinstance(q_keys, OpaqueKV):
            return q_keys.attend(queries, scale, mask)
        result: mx.array = original(queries, q_keys, q_values, scale, mask, group_size=group_size, bits=bits)
        return result

    attention.kvd_hook = True  # type: ignore[attr-defined]
    base.quantized_scaled_dot_product_attention = attention
