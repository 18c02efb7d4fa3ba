"""The check at load: each attention path on the actual device against a plain float32 reference, and the architecture
with this cache plugged in against mlx-lm's own. Milliseconds for the former, two dozen tokens for the latter.

Why: backends differ in what they get right. MLX 0.32.4 on CUDA gives NaN from fused attention for one query row in half
precision on a view that starts inside its array, where the array fills its buffer (`pool._zeros` sees to that). It may
end the process, so a child process tries it first.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from kvclient.errors import UnsupportedModel
from kvd.cache import kernel as kernels
from kvd.cache.attention import PagedTails, attend_bundle, attend_view
from kvd.cache.chunked import attend_chunk
from kvd.cache.hostmem import on_cpu
from kvd.cache.layout import KVLayout, LayerKV
from kvd.cache.paged import CachedSequence, PagedCache, forward
from kvd.cache.paths import Paths, preferences
from kvd.cache.plan import Bundle, Piece, View
from kvd.cache.pool import KVPool
from kvd.cache.side import Side

TOKENS = 24
TRIAL_S = 120.0
"""seconds: its first run may compile kernels"""
TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 8e-2}
"""largest error of a result, relative to the largest element of the reference"""
MODEL_ERRORS = (AttributeError, TypeError, ValueError, RuntimeError, IndexError, KeyError)
"""what a model raises that cannot use the object it is given"""


@dataclass(frozen=True, slots=True)
class PathCheck:
    """path: view, fold, table, chunk, kernel (the device), run, opaque, chunked (the architecture). error: relative to
    the reference; None where there is none."""

    path: str
    ok: bool
    error: float | None
    reason: str = ""


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
    trial = try_view(layout.dtype) if suspect(layout.dtype) else None
    found = check_device(layout, block_size, query_heads(model, layout), view=trial is None or trial.ok)
    found += [*([] if trial is None or trial.ok else [trial]), *check_architecture(model, layout)]
    ok = {item.path: item.ok for item in found}
    if not ok["run"]:
        reason = next(item.reason for item in found if item.path == "run")
        raise UnsupportedModel(
            f"{architecture} does not give its own results with the paged cache: {reason}",
            architecture=architecture, reason=reason,
        )  # fmt: skip
    paths = wanted(layout, block_size, query_heads(model, layout))
    chunked = ok.get("chunk", False) and ok.get("chunked", False)
    found_ok = replace(paths, opaque=ok["opaque"], chunked_from=paths.chunked_from if chunked else None)
    return Report(narrowed(found_ok, found, layout), tuple(found))


def narrowed(paths: Paths, found: Sequence[PathCheck], layout: KVLayout) -> Paths:
    """`paths` less what `check_device` found wrong. Quantised rows that no product reads right are put together for
    each layer of a step instead, one sequence at a time: opaque keys are off then."""
    ok = {item.path: item.ok for item in found}
    view, table = ok.get("view", False), ok["table"]
    opaque = paths.opaque and (layout.native or view or table)
    kernel = paths.kernel and opaque and ok.get("kernel", False)
    return replace(paths, view=view, table=table, fold=ok["fold"], opaque=opaque, kernel=kernel)


def wanted(layout: KVLayout, block_size: int, heads: int) -> Paths:
    """What this device and layout would use, were everything right. heads: query heads of a layer."""
    kernel = kernels.available() and kernels.takes(layout, block_size, heads)
    return preferences(layout.dtype, block_size, on_cpu(), kernel)


def query_heads(model: Any, layout: KVLayout) -> int:
    """Query heads of the first layer, as its configuration has them; two per KV head where it does not say."""
    heads = getattr(getattr(model, "args", None), "num_attention_heads", None)
    kv_heads = layout.layers[0].kv_heads
    return heads if isinstance(heads, int) and heads % kv_heads == 0 else 2 * kv_heads


# --- the device


def check_device(layout: KVLayout, block_size: int, heads: int, *, view: bool = True) -> list[PathCheck]:
    """Every path over small pools of each kind of layer, or all but the view path; the worst result of each path."""
    worst: dict[str, PathCheck] = {}
    for layer in dict.fromkeys(layout.layers):
        for item in _check_layer(layer, layout.dtype, block_size, max(1, heads // layer.kv_heads), view):
            known = worst.get(item.path)
            if known is None or (known.ok and (not item.ok or (item.error or 0) > (known.error or 0))):
                worst[item.path] = item
    return list(worst.values())


def _check_layer(layer: LayerKV, dtype: str, block_size: int, repeats: int, view: bool) -> list[PathCheck]:
    """Blocks 1 and 2 are a prefix, 3 and 5 the tails of two rows; block 0 keeps the run inside the array."""
    pool = KVPool(KVLayout((layer,), dtype), block_size, 6)
    mx.random.seed(0)
    kind = getattr(mx, dtype)
    for side, dim in ((pool.k[0], layer.k_dim), (pool.v[0], layer.v_dim)):
        rows = mx.random.normal((1, layer.kv_heads, 6 * block_size, dim)).astype(kind)
        parts = zip(side.parts, side.quantize(rows), strict=True)
        pool.write([(array, 1, part[..., 1:, :]) for array, part in parts])
    pool.evaluate()
    k, v = pool.k[0], pool.v[0]
    queries = mx.random.normal((2, layer.kv_heads * repeats, 1, layer.k_dim)).astype(kind)
    scale = layer.k_dim**-0.5
    prefix = Piece(block_size, 3 * block_size)
    own = (max(1, block_size - 3), 1)
    tails = ((3,), (5,))
    ends = [Piece(tail[0] * block_size, tail[0] * block_size + n) for tail, n in zip(tails, own, strict=True)]
    expected = mx.concatenate([_reference(queries[i : i + 1], k, v, [prefix, ends[i]], scale) for i in range(2)])
    first = _reference(queries[:1], k, v, [prefix], scale)
    folded = Bundle((0, 1), (prefix,), tails, own)
    scattered = Bundle((0, 1), (), ((1, 2, 3), (1, 2, 5)), tuple(2 * block_size + n for n in own))
    limit, use = TOLERANCE[dtype], wanted(pool.layout, block_size, layer.kv_heads * repeats)
    grain = use.grain
    chunks = [] if use.chunked_from is None else [_check_chunk(layer, repeats, limit)]
    paged = [_check_kernel(pool, queries, scattered, expected, scale, limit)] if use.kernel else []
    alone = [_compare("view", limit, first, lambda: _one(queries[:1], k, v, prefix, scale))] if view else []
    return [
        *chunks,
        *alone,
        *paged,
        _compare("fold", limit, expected, lambda: _bundle(queries, k, v, folded, scale, block_size, None)),
        _compare("table", limit, expected, lambda: _bundle(queries, k, v, scattered, scale, block_size, grain)),
    ]


def _check_kernel(
    pool: KVPool, queries: mx.array, scattered: Bundle, expected: mx.array, scale: float, limit: float
) -> PathCheck:
    """Two rows through their block tables, then the first of them as a run; each last row is written by the kernel."""
    k, v, size = pool.k[0], pool.v[0], pool.block_size
    (keys,), (values,) = k.parts, v.parts
    lasts = zip(scattered.tails, (n - 1 for n in scattered.lengths), strict=True)
    ends = [tail[last // size] * size + last % size for tail, last in lasts]
    tables = kernels.Tables.of([View(*pair) for pair in zip(scattered.tails, scattered.lengths, strict=True)])
    run = kernels.Span(size, scattered.lengths[0])

    def both() -> mx.array:
        new = [mx.concatenate([part[..., end : end + 1, :] for end in ends]) for part in (keys, values)]
        mx.eval(new)
        blank = [mx.zeros((1, *part.shape[1:2], 1, part.shape[3]), part.dtype) for part in (keys, values)]
        pool.write([(part, end, rows) for part, rows in zip((keys, values), blank, strict=True) for end in ends])
        pool.evaluate()
        outs = [kernels.attend_paged(queries, (new[0], new[1]), k, v, tables, scale, size)]
        mx.eval(outs)
        outs.append(kernels.attend_paged(queries, None, k, v, tables, scale, size))
        mx.eval(outs)
        outs.append(kernels.attend_paged(queries[:1], None, k, v, run, scale, size))
        return mx.concatenate(outs)

    return _compare("kernel", limit, mx.concatenate([expected, expected, expected[:1]]), both)


def _check_chunk(layer: LayerKV, repeats: int, limit: float) -> PathCheck:
    """A chunk of 70 rows behind 9 others against MLX's causal attention: pieces of unequal length, masked and not."""
    queries = mx.random.normal((1, layer.kv_heads * repeats, 70, layer.k_dim))
    keys, values = (mx.random.normal((1, layer.kv_heads, 79, dim)) for dim in (layer.k_dim, layer.v_dim))
    scale = layer.k_dim**-0.5
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask="causal")
    return _compare("chunk", limit, expected, lambda: attend_chunk(queries, keys, values, scale, 9))


def _one(queries: mx.array, k: Side, v: Side, piece: Piece, scale: float) -> mx.array:
    if k.precision.native and v.precision.native:
        return attend_view(queries, k, v, piece, scale)
    return attend_bundle(queries, k, v, [piece], None, scale)


def _bundle(
    queries: mx.array, k: Side, v: Side, bundle: Bundle, scale: float, block_size: int, grain: int | None
) -> mx.array:
    return attend_bundle(queries, k, v, bundle.shared, PagedTails.of(bundle, block_size, grain), scale)


def _reference(queries: mx.array, k: Side, v: Side, read: Sequence[Piece], scale: float) -> mx.array:
    """One row in float32, from copies that start at row 0 of arrays of their own."""
    keys, values = (
        mx.concatenate([side.plain(piece).astype(mx.float32) for piece in read], axis=-2) for side in (k, v)
    )
    repeats = queries.shape[1] // keys.shape[1]
    keys, values = mx.repeat(keys, repeats, axis=1), mx.repeat(values, repeats, axis=1)
    scores = (queries.astype(mx.float32) * scale) @ keys.swapaxes(-1, -2)
    return mx.softmax(scores, axis=-1) @ values


# --- the case that can end the process


def suspect(dtype: str) -> bool:
    """Whether fused attention on views has ended a process on this backend in some version."""
    return dtype != "float32" and not on_cpu() and not mx.metal.is_available()


def try_view(dtype: str, tried: Sequence[str] = (sys.executable, "-P", "-m", "kvd.cache.trial")) -> PathCheck:
    """The view path in a child process, which it may take down (an illegal memory access at 32K rows)."""
    try:
        child = subprocess.run([*tried, dtype], capture_output=True, text=True, timeout=TRIAL_S, check=True)
        error = float(child.stdout)
    except (subprocess.SubprocessError, ValueError) as problem:
        return PathCheck("view", False, None, f"{type(problem).__name__} in the child that tried it")
    ok = error <= TOLERANCE[dtype]
    return PathCheck("view", ok, error, "" if ok else f"relative error {error:.2g} in the child that tried it")


# --- the architecture


def check_architecture(model: Any, layout: KVLayout) -> list[PathCheck]:
    """24 tokens: 23 in a chunk and one step, then a step of two rows, against mlx-lm's own cache (always native KV)."""
    plain = tuple(LayerKV(layer.kv_heads, layer.k_dim, layer.v_dim) for layer in layout.layers)
    native = KVLayout(plain, layout.dtype)
    tokens = [(7 * i + 1) % 97 for i in range(TOKENS + 1)]
    stock = make_prompt_cache(model)
    model(mx.array([tokens[: TOKENS - 1]]), cache=stock)
    expected = [model(mx.array([[token]]), cache=stock)[:, -1, :] for token in tokens[TOKENS - 1 :]]
    mx.eval(expected)
    limit = TOLERANCE[layout.dtype]
    cache = PagedCache(native, 8, 16, initial_blocks=16, namespace=b"\0" * 16)
    sequence = cache.open([], None)

    def run(sequence: CachedSequence) -> mx.array:
        sequence.reserve(TOKENS - 1)
        forward(model, cache, [(sequence, tokens[: TOKENS - 1])], logits=False)
        sequence.advance(tokens[: TOKENS - 1])
        return _step(model, cache, [sequence], tokens[TOKENS - 1])

    def opaque() -> mx.array:
        twin = sequence.fork()
        return _step(model, cache, [sequence, twin], tokens[TOKENS])

    def chunked() -> mx.array:
        cache.paths = replace(cache.paths, chunked_from=1)
        return run(cache.open([], None))

    checks = [_compare("run", limit, expected[0], lambda: run(sequence))]
    if checks[0].ok:
        if cache.paths.chunked_from is not None:
            checks.append(_compare("chunked", limit, expected[0], chunked))
        checks.append(_compare("opaque", limit, mx.concatenate([expected[1]] * 2), opaque))
        if cache.windowed:
            checks[-1] = PathCheck("opaque", False, None, "the model asks for a sliding window over a plain cache")
    else:
        checks.append(PathCheck("opaque", False, None, "the run path failed"))
    return checks


def _step(model: Any, cache: PagedCache, sequences: Sequence[CachedSequence], token: int) -> mx.array:
    for sequence in sequences:
        sequence.reserve(1)
    out = forward(model, cache, [(sequence, [token]) for sequence in sequences])
    assert out is not None
    mx.eval(out)
    for sequence in sequences:
        sequence.advance([token])
    return out


def _compare(path: str, limit: float, expected: mx.array, compute: Callable[[], mx.array]) -> PathCheck:
    try:
        got = compute().astype(mx.float32)
        reference = expected.astype(mx.float32)
        ratio: Any = (mx.abs(got - reference).max() / mx.abs(reference).max()).item()
    except MODEL_ERRORS as problem:
        first_line = str(problem).partition("\n")[0]
        return PathCheck(path, False, None, f"{type(problem).__name__}: {first_line}")
    error = float(ratio)
    ok = error <= limit
    return PathCheck(path, ok, error, "" if ok else f"relative error {error:.2g} over {limit:.0e}")
