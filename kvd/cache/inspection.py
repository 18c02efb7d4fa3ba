"""What a loaded model needs of the cache: its layout, or why the paged mode cannot serve it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from kvclient.errors import UnsupportedModel
from kvd.cache.layout import KVLayout, LayerKV


def inspect_layout(model: Any, architecture: str | None = None) -> KVLayout:
    """The native layout, by running one token through mlx-lm's own caches.

    Raises UnsupportedModel, naming the architecture and its cache classes, where a layer is not a plain KVCache.
    """
    name = architecture or str(getattr(model, "model_type", type(model).__module__))
    caches = make_prompt_cache(model)
    kinds = Counter(type(cache).__name__ for cache in caches)
    if not caches or set(kinds) != {KVCache.__name__} or any(type(cache) is not KVCache for cache in caches):
        listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "no caches"
        raise UnsupportedModel(
            f"{name} keeps {listed}; the paged cache serves models whose layers all keep a plain KVCache",
            architecture=name, caches=dict(kinds),
        )
    mx.eval(model(mx.array([[0]]), cache=caches))
    layers = []
    for cache in caches:
        keys, values = cache.keys, cache.values
        if keys is None or keys.ndim != 4 or keys.shape[1] != values.shape[1]:
            raise UnsupportedModel(f"{name} leaves a cache unused or with unequal heads for K and V", architecture=name)
        layers.append(LayerKV(keys.shape[1], keys.shape[3], values.shape[3]))
    return KVLayout(tuple(layers), str(caches[0].keys.dtype).removeprefix("mlx.core."))
