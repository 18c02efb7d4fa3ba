"""mlx-lm as it comes, on the same weights: the baseline of prefill."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from kvd.models.load import load


def main() -> None:
    loaded = load(Path(sys.argv[1]))
    model = loaded.model
    for line in sys.stdin:
        ask = json.loads(line)
        print(json.dumps({"seconds": prefill(model, ask["offset"], ask["rows"], ask["chunk"])}), flush=True)


def prefill(model, offset: int, rows: int, chunk: int) -> float:
    """Seconds for `rows` tokens behind `offset` cached ones, in chunks, to the first token's logits."""
    cache = make_prompt_cache(model)
    ids = mx.random.randint(0, 1000, (1, rows))
    if offset:
        for layer in cache:  # any values do: time does not depend on them
            attention = model.layers[0].self_attn
            shape = (1, attention.n_kv_heads, offset, attention.head_dim)
            layer.update_and_fetch(mx.random.normal(shape), mx.random.normal(shape))
        mx.eval([layer.state for layer in cache])
    begin = time.perf_counter()
    at = 0
    while at < rows - 1:
        step = min(chunk - (offset + at) % chunk, rows - 1 - at)
        mx.eval(model(ids[:, at : at + step], cache=cache)[:, -1, :1], [layer.state for layer in cache])
        at += step
    mx.eval(mx.argmax(model(ids[:, at:], cache=cache)[:, -1], axis=-1))
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
