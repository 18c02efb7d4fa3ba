"""mlx-lm as it comes, on the same weights: the baseline of prefill and of decode."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from kvd.models.load import load


def main() -> None:
    model = load(Path(sys.argv[1])).model
    for line in sys.stdin:
        ask = json.loads(line)
        what = {"prefill": prefill, "decode": decode}[ask.pop("what")]
        print(json.dumps({"seconds": what(model, **ask)}), flush=True)


def filled(model: Any, rows: int) -> list[Any]:
    """A cache of `rows` random rows: time does not depend on the values."""
    cache = make_prompt_cache(model)
    attention = model.layers[0].self_attn
    shape = (1, attention.n_kv_heads, rows, attention.head_dim)
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
    cache = filled(model, position)
    token = mx.array([[1]])
    for index in range(steps + 3):
        if index == 3:
            mx.eval(token)
            begin = time.perf_counter()
        token = mx.argmax(model(token, cache=cache)[:, -1], axis=-1)[None]
        mx.async_eval(token)
    mx.eval(token)
    return (time.perf_counter() - begin) / steps


if __name__ == "__main__":
    main()
