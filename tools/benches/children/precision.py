"""KV precisions on one model: bytes of the pool, peak memory of a prefill, decode steps against mlx-lm's caches.

KV is synthetic: neither bytes nor time depend on its values.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from benches.children.synthetic import filled, single
from kvd.cache import precision
from kvd.cache.check import check
from kvd.cache.inspection import inspect_layout
from kvd.cache.layout import KVLayout
from kvd.cache.paged import CachedSequence, PagedCache, forward
from kvd.cache.paths import Paths
from kvd.models.load import load

BLOCK = 256
CHUNK = 512
GROUP = 64
WARM = 4


def main() -> None:
    loaded = load(Path(sys.argv[1]))
    bench = Bench(loaded.model, loaded.info.architecture, loaded.info.backend)
    for line in sys.stdin:
        ask = json.loads(line)
        print(json.dumps(getattr(bench, ask.pop("what"))(**ask)), flush=True)


class Bench:
    def __init__(self, model: Any, architecture: str, backend: str) -> None:
        self.model, self.architecture = model, architecture
        self.clock = time.process_time if backend == "cpu" else time.perf_counter
        """on the CPU its own seconds: what neighbours take does not count"""
        self.native = inspect_layout(model, architecture)

    def memory(self, kv: str, tokens: int) -> dict[str, Any]:
        """Bytes per token by the formula and by mlx's count of what the pool took; and the most that the last chunk of
        a prefill of `tokens` tokens holds beyond the weights, the pool included."""
        layout = precision.apply(self.native, kv)
        paths = check(self.model, layout, BLOCK, self.architecture).paths
        gc.collect()  # caches and sequences refer to each other
        mx.clear_cache()
        before = mx.get_active_memory()
        cache, sequence = self._filled(layout, paths, tokens - CHUNK, tokens)
        held = mx.get_active_memory() - before
        mx.clear_cache()
        mx.reset_peak_memory()
        part = [1] * CHUNK
        sequence.reserve(CHUNK)
        forward(self.model, cache, [(sequence, part)], logits=False)
        return {
            "formula": cache.layout.bytes_per_token(),
            "measured": held / (cache.stats.blocks_total * BLOCK),
            "live": cache.stats.bytes_live / (cache.stats.blocks_live * BLOCK),
            "peak": mx.get_peak_memory() - before,
        }

    def decode(self, pairs: list[tuple[str, list[int]]], position: int, rounds: int) -> dict[str, Any]:
        """pairs: ours at a precision, mlx-lm's caches at these bits (0: KVCache). All steps are measured in turn; for
        each pair the seconds of ours and of the slowest of its others, and the median of the ratios of rounds."""
        steps: dict[str | int, Callable[[], None]] = {kv: self._ours(kv, position, rounds) for kv, _ in pairs}
        steps |= {bits: self._stock(bits, position) for _, others in pairs for bits in others}
        took: dict[str | int, list[float]] = {name: [] for name in steps}
        for index in range(WARM + rounds):
            for name in steps if index % 2 else reversed(steps):
                begin = self.clock()
                steps[name]()
                if index >= WARM:
                    took[name].append(self.clock() - begin)
        return {"pairs": [self._compared(took[kv], [took[bits] for bits in others]) for kv, others in pairs]}

    @staticmethod
    def _compared(mine: list[float], others: list[list[float]]) -> dict[str, float]:
        slowest = max(others, key=statistics.median)
        ratio = statistics.median(a / b for a, b in zip(mine, slowest, strict=True))
        return {"ours": statistics.median(mine), "stock": statistics.median(slowest), "ratio": ratio}

    def _filled(self, layout: KVLayout, paths: Paths, rows: int, expected: int) -> tuple[PagedCache, CachedSequence]:
        blocks = -(-expected // BLOCK)
        cache = PagedCache(layout, BLOCK, blocks, initial_blocks=blocks, namespace=bytes(16))
        cache.paths = paths
        return cache, filled(cache, rows, expected - rows)

    def _ours(self, kv: str, position: int, rounds: int) -> Callable[[], None]:
        layout = precision.apply(self.native, kv)
        paths = check(self.model, layout, BLOCK, self.architecture).paths
        cache, sequence = self._filled(layout, paths, position, position + rounds + WARM + 1)
        return single(self.model, cache, sequence)

    def _stock(self, bits: int, position: int) -> Callable[[], None]:
        caches: list[Any] = [QuantizedKVCache(GROUP, bits) if bits else KVCache() for _ in self.native.layers]
        for layer, cache in zip(self.native.layers, caches, strict=True):
            shape = (1, layer.kv_heads, position, layer.k_dim)
            new = mx.random.normal(shape).astype(getattr(mx, self.native.dtype))
            cache.update_and_fetch(new, new)
            mx.eval(cache.state)
        token = mx.array([[1]])

        def step() -> None:
            mx.eval(mx.argmax(self.model(token, cache=caches)[:, -1], axis=-1))

        return step


if __name__ == "__main__":
    main()
