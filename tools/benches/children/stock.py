"""mlx-lm as it comes, on the same weights: the baseline of prefill and of decode."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache

from kvd.models.load import load
from kvd.models.rows import EmbeddingRowsTogether, RowsTogether


def main() -> None:
    model = as_it_comes(load(Path(sys.argv[1])).model)
    for line in sys.stdin:
        ask = json.loads(line)
        measures: dict[str, Callable[..., float]] = {"prefill": prefill, "decode": decode, "batch": batch}
        print(json.dumps({"seconds": measures[ask.pop("what")](model, **ask)}), flush=True)


def as_it_comes(model: Any) -> Any:
    """Without what kvd does to its layers (`kvd.models.rows`)."""
    kinds: dict[type, type] = {RowsTogether: QuantizedLinear, EmbeddingRowsTogether: QuantizedEmbedding}
    for module in model.modules():
        module.__class__ = kinds.get(type(module), type(module))
    return model


def filled(model: Any, rows: int, batch: int | None = None) -> list[Any]:
    """A cache of `rows` random rows, for each sequence of a batch: time does not depend on the values."""
    cache = make_prompt_cache(model) if batch is None else [BatchKVCache([0] * batch) for _ in model.layers]
    attention = model.layers[0].self_attn
    shape = (batch or 1, attention.n_kv_heads, rows, attention.head_dim)
    kind = model.layers[0].input_layernorm.weight.dtype
    if rows:
        for layer in cache:
            layer.update_and_fetch(mx.random.normal(shape, kind), mx.random.normal(shape, kind))
        mx.eval([layer.state for layer in cache])
    return cache


def prefill(model: Any, offset: int, rows: int, chunk: int) -> float:
    """Seconds for `rows` tokens behind `offset` cached ones, in chunks, to the first token."""
    cache = filled(model, offset)
    ids = mx.random.randint(0, 1000, (1, rows))
    begin = time.perf_counter()
    at = 0
    while at < rows - 1:
        step = min(chunk - (offset + at) % chunk, rows - 1 - at)
        model(ids[:, at : at + step], cache=cache)
        mx.eval([layer.state for layer in cache])
        at += step
    mx.eval(mx.argmax(model(ids[:, at:], cache=cache)[:, -1], axis=-1))
    return time.perf_counter() - begin


def decode(model: Any, position: int, steps: int) -> float:
    """Seconds per greedy token behind `position` rows, the next step put in line before a token is looked at."""
    return stepped(model, filled(model, position), mx.array([[1]]), steps)


def batch(model: Any, position: int, sequences: int, steps: int) -> float:
    """Seconds per step of `sequences` together, each with `position` rows of its own: mlx-lm's batches share none."""
    return stepped(model, filled(model, position, sequences), mx.ones((sequences, 1), mx.int32), steps)


def stepped(model: Any, cache: list[Any], token: mx.array, steps: int) -> float:
    for index in range(steps + 3):
        if index == 3:
            mx.eval(token)
            begin = time.perf_counter()
        token = mx.argmax(model(token, cache=cache)[:, -1], axis=-1)[:, None]
        mx.async_eval(token)
    mx.eval(token)
    return (time.perf_counter() - begin) / steps


if __name__ == "__main__":
    main()
