"""The check at load: the paths that the device gets right (`check_device`), and the architecture with this cache
plugged in against mlx-lm's own. Milliseconds and two dozen tokens; minutes where kernels have to be compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from kvclient.errors import UnsupportedModel
from kvd.cache.check_device import TOLERANCE, PathCheck, check_device, compare, wanted
from kvd.cache.hostmem import address, on_cpu
from kvd.cache.kernel import WHOLE_FROM
from kvd.cache.layout import KVLayout, LayerKV
from kvd.cache.nvrtc import available
from kvd.cache.paged import CachedSequence, PagedCache, forward
from kvd.cache.paths import Paths

TOKENS = 24
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Report:
    paths: Paths
    checks: tuple[PathCheck, ...]

    @property
    def batchable(self) -> bool:
        """Whether decode batches run in one pass."""
        return self.paths.opaque


def check(model: Any, layout: KVLayout, block_size: int, architecture: str) -> Report:
    """Check what this model will use; `PagedCache.paths` takes the result.

    Raises UnsupportedModel where even one plain run does not give the model's own logits.
    """
    heads = query_heads(model, layout)
    found = check_device(layout, block_size, heads)
    found += check_architecture(model, layout, heads, kernel=any(item.path == "kernel" and item.ok for item in found))
    ok = {item.path: item.ok for item in found}
    if not ok["run"]:
        reason = next(item.reason for item in found if item.path == "run")
        raise UnsupportedModel(
            f"{architecture} does not give its own results with the paged cache: {reason}",
            architecture=architecture, reason=reason,
        )  # fmt: skip
    paths = wanted(layout, block_size, heads)
    chunked = ok.get("chunk", False) and ok.get("chunked", False)
    ahead = ok.get("ahead", on_cpu() or available())  # what is in flight on a GPU makes updates copy the pool
    found_ok = replace(
        paths, opaque=ok["opaque"], chunked_from=paths.chunked_from if chunked else None, ahead=ahead
    )
    return Report(narrowed(found_ok, found, layout), tuple(found))


def narrowed(paths: Paths, found: Sequence[PathCheck], layout: KVLayout) -> Paths:
    """`paths` less what `check_device` found wrong. Quantised rows that no product reads right are put together for
    each layer of a step instead, one sequence at a time: opaque keys are off then."""
    ok = {item.path: item.ok for item in found}
    view, table, fold = (ok.get(path, False) for path in ("view", "table", "fold"))
    right = ok.get("kernel", False)
    opaque = paths.opaque and (layout.native or view or table or right)
    kernel = paths.kernel and opaque and right
    return replace(paths, view=view, table=table, fold=fold, opaque=opaque, kernel=kernel)


def query_heads(model: Any, layout: KVLayout) -> int:
    """Query heads of the first layer, as its configuration has them; two per KV head where it does not say."""
    heads = getattr(getattr(model, "args", None), "num_attention_heads", None)
    kv_heads = layout.layers[0].kv_heads
    return heads if isinstance(heads, int) and heads % kv_heads == 0 else 2 * kv_heads


# --- the architecture


def check_architecture(model: Any, layout: KVLayout, heads: int, *, kernel: bool) -> list[PathCheck]:
    """24 tokens: 23 in a chunk and one step, then a step of several rows, against mlx-lm's own cache. Native KV always.

    On a GPU eight rows, from which on MLX takes other products (the kernel's steps make as many of `WHOLE_FROM`): if
    those have to be compiled, it is now.
    """
    plain = tuple(LayerKV(layer.kv_heads, layer.k_dim, layer.v_dim) for layer in layout.layers)
    native = KVLayout(plain, layout.dtype)
    tokens = [(7 * i + 1) % 97 for i in range(TOKENS + 1)]
    stock = make_prompt_cache(model)
    model(mx.array([tokens[: TOKENS - 1]]), cache=stock)
    expected = [model(mx.array([[token]]), cache=stock)[:, -1, :] for token in tokens[TOKENS - 1 :]]
    mx.eval(expected)
    limit = TOLERANCE[layout.dtype]
    rows = 2 if on_cpu() else WHOLE_FROM if kernel else 8
    cache = PagedCache(native, BLOCK, 16, initial_blocks=16, namespace=b"\0" * 16)
    cache.paths = replace(wanted(native, BLOCK, heads), kernel=kernel)
    sequence = cache.open([], None)

    def run(sequence: CachedSequence) -> mx.array:
        sequence.reserve(TOKENS - 1)
        forward(model, cache, [(sequence, tokens[: TOKENS - 1])], logits=False)
        sequence.advance(tokens[: TOKENS - 1])
        return _step(model, cache, [sequence], tokens[TOKENS - 1])

    def opaque() -> mx.array:
        twins = [sequence.fork() for _ in range(rows - 1)]
        return _step(model, cache, [sequence, *twins], tokens[TOKENS])

    def chunked() -> mx.array:
        cache.paths = replace(cache.paths, chunked_from=1)
        return run(cache.open([], None))

    checks = [compare("run", limit, expected[0], lambda: run(sequence))]
    if checks[0].ok:
        if cache.paths.chunked_from is not None:
            checks.append(compare("chunked", limit, expected[0], chunked))
        checks.append(compare("opaque", limit, mx.concatenate([expected[1]] * rows), opaque))
        if cache.windowed:
            checks[-1] = PathCheck("opaque", False, None, "the model asks for a sliding window over a plain cache")
        if mx.metal.is_available():
            checks.append(check_ahead(model, cache, sequence))
    else:
        checks.append(PathCheck("opaque", False, None, "the run path failed"))
    return checks


def check_ahead(model: Any, cache: PagedCache, sequence: CachedSequence) -> PathCheck:
    """Whether the pool's updates are in place when the step before is still in line. MLX does not wait for it, and what
    is in flight on a GPU refers to the pool: in a model of few layers every step would copy all of it."""
    sequence.reserve(2)
    mx.synchronize()  # the first step is behind nothing: two copies may end where they began
    before = [address(array) for array in cache.pool.arrays]
    token = mx.array([1])
    for _ in range(2):
        out = forward(model, cache, [(sequence, [1])], inputs=token)
        assert out is not None
        token = mx.argmax(out, axis=-1)
        mx.async_eval(token)
        sequence.advance([1])
    cache.pool.evaluate()
    stays = [address(array) for array in cache.pool.arrays] == before
    return PathCheck("ahead", stays, None, "" if stays else "an update behind a step in line copies the pool")


def _step(model: Any, cache: PagedCache, sequences: Sequence[CachedSequence], token: int) -> mx.array:
    for sequence in sequences:
        sequence.reserve(1)
    out = forward(model, cache, [(sequence, [token]) for sequence in sequences])
    assert out is not None
    mx.eval(out)
    for sequence in sequences:
        sequence.advance([token])
    return out
