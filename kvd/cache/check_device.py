"""The check at load, of the device: each attention path that would be used, against a plain float32 reference.

Why: backends differ in what they get right. MLX 0.32.4 on CUDA gives NaN from fused attention for one query row in half
precision on a view that starts inside its array, where the array fills its buffer (`pool._zeros` sees to that). It may
end the process, so a child process tries it first, as it does our kernel over quantised KV.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvd.cache import kernel as kernels
from kvd.cache.attention import PagedTails, attend_bundle, attend_view
from kvd.cache.chunked import attend_chunk
from kvd.cache.hostmem import on_cpu
from kvd.cache.layout import KVLayout, LayerKV, Precision
from kvd.cache.nvrtc import available
from kvd.cache.paths import Paths, preferences
from kvd.cache.plan import Bundle, Piece, View
from kvd.cache.pool import KVPool
from kvd.cache.side import Side
from kvd.cache.steps import last_row

TRIED = (sys.executable, "-P", "-m", "kvd.cache.trial")
TRIAL_S = 120.0
"""seconds: its first run may compile kernels"""
TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 8e-2}
"""largest error of a result, relative to the largest element of the reference"""
MODEL_ERRORS = (AttributeError, TypeError, ValueError, RuntimeError, IndexError, KeyError)
"""what a model raises that cannot use the object it is given"""


@dataclass(frozen=True, slots=True)
class PathCheck:
    """path: view, fold, table, chunk, kernel (the device), run, opaque, chunked, ahead (the architecture). error:
    relative to the reference; None where there is none."""

    path: str
    ok: bool
    error: float | None
    reason: str = ""


def wanted(layout: KVLayout, block_size: int, heads: int) -> Paths:
    """What this device and layout would use, were everything right. heads: query heads of a layer."""
    kernel = available() and kernels.takes(layout, block_size, heads)
    return preferences(layout.dtype, block_size, on_cpu(), kernel)


def check_device(layout: KVLayout, block_size: int, heads: int, *, view: bool | None = None) -> list[PathCheck]:
    """Every path that would be used, over small pools of each kind of layer; the worst result of each path. view: False
    leaves that path out; None tries it in a child process first where it may end this one.

    Where there is a kernel and it is right, decode uses nothing else, and nothing else is looked at: on a fresh machine
    MLX compiles for a minute to run the others.
    """
    kinds = [_Trial.of(layer, layout.dtype, block_size, heads) for layer in dict.fromkeys(layout.layers)]
    kernel = []
    if wanted(layout, block_size, heads).kernel:
        before = None if layout.native else try_kernel(layout, block_size, heads)
        kernel = [_check_kernel(kind) for kind in kinds] if before is None or before.ok else [before]
    if kernel and all(item.ok for item in kernel):
        return _worst(kernel)
    tried = try_view(layout.dtype) if view is None and suspect(layout.dtype) else None
    use_view = view is not False and (tried is None or tried.ok)
    others = [item for kind in kinds for item in _check_portable(kind, use_view)]
    return [*_worst([*kernel, *others]), *([] if tried is None or tried.ok else [tried])]


def _worst(found: Sequence[PathCheck]) -> list[PathCheck]:
    worst: dict[str, PathCheck] = {}
    for item in found:
        known = worst.get(item.path)
        if known is None or (known.ok and (not item.ok or (item.error or 0) > (known.error or 0))):
            worst[item.path] = item
    return list(worst.values())


@dataclass(frozen=True, slots=True)
class _Trial:
    """A pool with two sequences: blocks 1 and 2 are a prefix, 3 and 5 the tails; block 0 keeps the run inside the
    array. expected: of both rows in float32; first: of one row over the prefix alone."""

    layer: LayerKV
    dtype: str
    pool: KVPool
    queries: mx.array
    scale: float
    expected: mx.array
    first: mx.array

    @staticmethod
    def of(layer: LayerKV, dtype: str, block_size: int, heads: int) -> _Trial:
        pool = KVPool(KVLayout((layer,), dtype), block_size, 6)
        mx.random.seed(0)
        kind = getattr(mx, dtype)
        for side, dim in ((pool.k[0], layer.k_dim), (pool.v[0], layer.v_dim)):
            rows = mx.random.normal((1, layer.kv_heads, 6 * block_size, dim)).astype(kind)
            parts = zip(side.parts, side.quantize(rows), strict=True)
            pool.write([(array, 1, part[..., 1:, :]) for array, part in parts])
        pool.evaluate()
        k, v = pool.k[0], pool.v[0]
        repeats = max(1, heads // layer.kv_heads)
        queries = mx.random.normal((2, layer.kv_heads * repeats, 1, layer.k_dim)).astype(kind)
        scale = layer.k_dim**-0.5
        prefix = Piece(block_size, 3 * block_size)
        tails = zip((3 * block_size, 5 * block_size), _own(block_size), strict=True)
        ends = [Piece(start, start + n) for start, n in tails]
        both = [_reference(queries[i : i + 1], k, v, [prefix, ends[i]], scale) for i in range(2)]
        first = _reference(queries[:1], k, v, [prefix], scale)
        return _Trial(layer, dtype, pool, queries, scale, mx.concatenate(both), first)

    @property
    def prefix(self) -> Piece:
        return Piece(self.pool.block_size, 3 * self.pool.block_size)

    @property
    def folded(self) -> Bundle:
        return Bundle((0, 1), (self.prefix,), ((3,), (5,)), _own(self.pool.block_size))

    @property
    def scattered(self) -> Bundle:
        lengths = tuple(2 * self.pool.block_size + n for n in _own(self.pool.block_size))
        return Bundle((0, 1), (), ((1, 2, 3), (1, 2, 5)), lengths)


def _own(block_size: int) -> tuple[int, int]:
    """Rows of the two tails."""
    return max(1, block_size - 3), 1


def _check_portable(trial: _Trial, view: bool) -> list[PathCheck]:
    pool, queries, scale, size = trial.pool, trial.queries, trial.scale, trial.pool.block_size
    k, v = pool.k[0], pool.v[0]
    limit, use = TOLERANCE[trial.dtype], preferences(trial.dtype, size, on_cpu())
    repeats = queries.shape[1] // trial.layer.kv_heads
    folded, scattered = trial.folded, trial.scattered
    chunks = [] if use.chunked_from is None else [_check_chunk(trial.layer, repeats, limit)]
    alone = (
        [compare("view", limit, trial.first, lambda: _one(queries[:1], k, v, trial.prefix, scale))] if view else []
    )
    return [
        *chunks,
        *alone,
        compare("fold", limit, trial.expected, lambda: _bundle(queries, k, v, folded, scale, size, None)),
        compare("table", limit, trial.expected, lambda: _bundle(queries, k, v, scattered, scale, size, use.grain)),
    ]


def _check_kernel(trial: _Trial) -> PathCheck:
    """Both rows through their block tables, then the first of them as a run; each last row is written first."""
    pool, queries, scale, scattered = trial.pool, trial.queries, trial.scale, trial.scattered
    k, v, size = pool.k[0], pool.v[0], pool.block_size
    views = [View(*pair) for pair in zip(scattered.tails, scattered.lengths, strict=True)]
    ends = [last_row(view, size) for view in views]
    tables, run = kernels.Tables.of(views), kernels.Span(size, scattered.lengths[0])
    at = None if pool.layout.native else mx.array(ends, dtype=mx.int32)

    def both() -> mx.array:
        new = [mx.concatenate([side.plain(Piece(end, end + 1)) for end in ends]) for side in (k, v)]
        mx.eval(new)
        blank = [(part, mx.zeros((1, part.shape[1], 1, part.shape[3]), part.dtype)) for part in (*k.parts, *v.parts)]
        pool.write([(part, end, row) for part, row in blank for end in ends])
        pool.evaluate()
        outs = [kernels.attend_paged(queries, (new[0], new[1]), k, v, tables, scale, size, at)]
        mx.eval(outs)
        outs.append(kernels.attend_paged(queries, None, k, v, tables, scale, size))
        mx.eval(outs)
        outs.append(kernels.attend_paged(queries[:1], None, k, v, run, scale, size))
        return mx.concatenate(outs)

    expected = mx.concatenate([trial.expected, trial.expected, trial.expected[:1]])
    return compare("kernel", TOLERANCE[trial.dtype], expected, both)


def _check_chunk(layer: LayerKV, repeats: int, limit: float) -> PathCheck:
    """A chunk of 70 rows behind 9 others against MLX's causal attention: pieces of unequal length, masked and not."""
    queries = mx.random.normal((1, layer.kv_heads * repeats, 70, layer.k_dim))
    keys, values = (mx.random.normal((1, layer.kv_heads, 79, dim)) for dim in (layer.k_dim, layer.v_dim))
    scale = layer.k_dim**-0.5
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask="causal")
    return compare("chunk", limit, expected, lambda: attend_chunk(queries, keys, values, scale, 9))


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


def try_view(dtype: str, tried: Sequence[str] = TRIED) -> PathCheck:
    """The view path in a child process, which it may take down (an illegal memory access at 32K rows)."""
    return _in_child("view", dtype, [*tried, "view", dtype])


def try_kernel(layout: KVLayout, block_size: int, heads: int, tried: Sequence[str] = TRIED) -> PathCheck:
    """The kernel over quantised KV in a child process: what reaches beyond an array ends the process that ran it."""
    layers = [
        [layer.kv_heads, layer.k_dim, layer.v_dim, layer.k.bits, layer.k.group, layer.v.bits, layer.v.group]
        for layer in dict.fromkeys(layout.layers)
    ]
    return _in_child("kernel", layout.dtype, [*tried, "kernel", json.dumps([layout.dtype, block_size, heads, layers])])


def _in_child(path: str, dtype: str, command: Sequence[str]) -> PathCheck:
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=TRIAL_S, check=True)
        error = float(child.stdout)
    except (subprocess.SubprocessError, ValueError) as problem:
        return PathCheck(path, False, None, f"{type(problem).__name__} in the child that tried it")
    ok = error <= TOLERANCE[dtype]
    return PathCheck(path, ok, error, "" if ok else f"relative error {error:.2g} in the child that tried it")


def kernel_error(told: str) -> float:
    """What `try_kernel` asks for, in the child: the worst relative error; NaN where there is none."""
    dtype, block_size, heads, layers = json.loads(told)
    kinds = [
        LayerKV(kv_heads, k_dim, v_dim, Precision(*numbers[:2]), Precision(*numbers[2:]))
        for kv_heads, k_dim, v_dim, *numbers in layers
    ]
    errors = [_check_kernel(_Trial.of(kind, dtype, block_size, heads)).error for kind in kinds]
    return max((error for error in errors if error is not None), default=0.0) if None not in errors else math.nan


def compare(path: str, limit: float, expected: mx.array, compute: Callable[[], mx.array]) -> PathCheck:
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
