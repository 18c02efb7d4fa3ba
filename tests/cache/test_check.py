"""The check at load finds paths that do not work, and says so by name."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_lm.models.cache import RotatingKVCache

from kvclient.errors import UnsupportedModel
from kvd.cache import check as architecture
from kvd.cache import check_device as checks
from kvd.cache import kernel, precision
from kvd.cache.check import check, narrowed
from kvd.cache.check_device import PathCheck, check_device, wanted
from kvd.cache.hostmem import on_cpu
from kvd.cache.inspection import inspect_layout
from kvd.cache.kernel import Span
from kvd.cache.layout import KVLayout, LayerKV, Precision
from kvd.cache.paged import PagedCache
from kvd.cache.paths import Paths, preferences
from tests.cache.support import BLOCK, ask, model, near, new_cache, prompt, step_batch, stock_logits


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_usual_architectures_pass_every_check(family):
    net = model(family)
    report = check(net, inspect_layout(net), BLOCK, family)
    assert report.paths == preferences("float32", BLOCK, on_cpu()) and report.batchable
    assert {item.path for item in report.checks} == {"view", "fold", "table", "run", "opaque", "chunk", "chunked"}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("k", [Precision(), Precision(8, 32), Precision(4, 64)])
@pytest.mark.parametrize("v", [Precision(), Precision(4, 32)])
def test_every_precision_passes_on_this_device(dtype, k, v):
    for item in check_device(KVLayout((LayerKV(2, 64, 64, k, v),), dtype), 16, 4):
        unsupported = dtype != "float32" and (k.native or v.native) and item.path in ("fold", "table")
        if unsupported and mx.default_device() == mx.Device(mx.cpu):
            assert not item.ok and "float32" in item.reason, "mlx's CPU gather_mm takes halves now: fold them"
        else:
            assert item.ok, item


def test_a_path_that_gives_nan_is_switched_off_with_its_reason(monkeypatch):
    def broken(queries, k, v, piece, scale):
        return mx.full((1, queries.shape[1], 1, 32), float("nan"))

    monkeypatch.setattr(checks, "attend_view", broken)
    net = model()
    report = check(net, inspect_layout(net), BLOCK, "llama")
    assert report.paths == replace(preferences("float32", BLOCK, on_cpu()), view=False)
    assert next(item for item in report.checks if item.path == "view").reason


@pytest.mark.parametrize(
    "program", ["print('nan')", "print(0.5)", "import os; os.abort()", "print('no number')"],
)  # fmt: skip
def test_a_view_that_fails_in_the_child_is_off_and_nothing_else(monkeypatch, program):
    monkeypatch.setattr(checks, "suspect", lambda dtype: True)
    tried = checks.try_view("float32", (sys.executable, "-c", program))
    monkeypatch.setattr(checks, "try_view", lambda dtype: tried)
    net = model()
    report = check(net, inspect_layout(net), BLOCK, "llama")
    assert report.paths == replace(preferences("float32", BLOCK, on_cpu()), view=False)
    assert next(item for item in report.checks if item.path == "view").reason


def test_quantised_rows_that_no_product_reads_right_are_put_together(monkeypatch):
    """MLX 0.32.4 on CUDA multiplies a view of several heads with the first head's rows only."""

    def broken(*args, **options):
        raise RuntimeError("not for these strides")

    net = model()
    quantised = precision.apply(inspect_layout(net), "k8v4")
    for name in ("quantized_matmul", "gather_qmm"):
        monkeypatch.setattr(mx, name, broken)
    report = check(net, quantised, BLOCK, "llama")
    assert (report.paths.view, report.paths.table, report.paths.opaque) == (False, False, False)
    cache = PagedCache(quantised, BLOCK, 16, initial_blocks=16, namespace=bytes(16))
    cache.paths = report.paths
    sequences = [ask(net, cache, prompt(count, seed=count))[1] for count in (9, 2 * BLOCK + 3)]
    assert step_batch(net, cache, sequences, [5, 6]).shape[0] == 2


def test_the_child_finds_this_device_right():
    found = checks.try_view("float32")
    assert found.ok and found.error is not None


VARIANTS = [
    Paths(view=False), Paths(fold=False), Paths(table=False), Paths(opaque=False), Paths(table_from=1),
    Paths(table_batch=2, grain=BLOCK // 4),
]  # fmt: skip


@pytest.mark.parametrize("paths", VARIANTS)
def test_without_a_path_results_are_the_same(paths):
    net = model()
    cache = new_cache(net)
    cache.paths = paths
    shared = prompt(3 * BLOCK)
    prompts = [shared + [1, 2], shared + [3], prompt(9, seed=4)]
    sequences = [ask(net, cache, tokens)[1] for tokens in prompts]
    out = step_batch(net, cache, sequences, [5, 6, 7])
    for i, tokens in enumerate(prompts):
        assert near(out[i : i + 1], stock_logits(net, tokens + [5 + i]))


def test_an_architecture_that_needs_real_keys_still_decodes_one_at_a_time(monkeypatch):
    net = model()
    attention = type(net.layers[0].self_attn)
    original = attention.__call__

    class Peeking:
        """Asks the keys for their shape, as some architectures do."""

        def __call__(self, x, mask=None, cache=None):
            if hasattr(cache, "bits"):
                raise AttributeError("'OpaqueKV' object has no attribute 'shape'")
            return original(self, x, mask, cache)

    monkeypatch.setattr(attention, "__call__", Peeking.__call__)
    report = check(net, inspect_layout(net), BLOCK, "peeking")
    assert not report.batchable and "shape" in next(c for c in report.checks if c.path == "opaque").reason


def test_an_architecture_that_needs_real_keys_for_a_chunk_gets_them(monkeypatch):
    net = model()
    attention = type(net.layers[0].self_attn)
    original = attention.__call__

    def peeking(self, x, mask=None, cache=None):
        if hasattr(cache, "bits") and x.shape[1] > 1:
            raise AttributeError("'OpaqueKV' object has no attribute 'shape'")
        return original(self, x, mask, cache)

    monkeypatch.setattr(attention, "__call__", peeking)
    report = check(net, inspect_layout(net), BLOCK, "peeking")
    assert report.batchable and report.paths.chunked_from is None


def test_an_architecture_with_other_caches_is_refused_by_name(monkeypatch):
    net = SimpleNamespace(model_type="sliding", make_cache=lambda: [RotatingKVCache(8)])
    with pytest.raises(UnsupportedModel) as caught:
        inspect_layout(net)
    assert "sliding" in str(caught.value) and "RotatingKVCache" in str(caught.value)


def test_an_architecture_that_ignores_the_cache_is_refused(monkeypatch):
    net = model()
    attention = type(net.layers[0].self_attn)
    original = attention.__call__

    def forgetful(self, x, mask=None, cache=None):
        if type(cache).__name__ == "LayerCache":
            cache = None
        return original(self, x, mask, cache)

    layout = inspect_layout(net)
    monkeypatch.setattr(attention, "__call__", forgetful)
    with pytest.raises(UnsupportedModel) as caught:
        check(net, layout, BLOCK, "forgetful")
    assert "forgetful" in str(caught.value)


def portable_kernel(queries, new, k, v, where, scale, block_size, at=None):
    """What the CUDA kernel does, row by row in float32."""
    assert new is None or (at is None) == k.precision.native
    runs = isinstance(where, Span)
    tables = [range(where.first, where.first + where.longest)] if runs else [
        [row for block in table for row in range(block * block_size, (block + 1) * block_size)][:n]
        for table, n in zip(where.blocks.tolist(), where.lengths.tolist(), strict=True)
    ]  # fmt: skip
    outs = []
    for i, rows in enumerate(tables):
        if new is not None:
            assert at is None or at.tolist()[i] == rows[-1]
            for side, values in zip((k, v), new, strict=True):
                for part, row in zip(side.parts, side.quantize(values[i : i + 1]), strict=True):
                    part[..., rows[-1] : rows[-1] + 1, :] = row
        read = [tuple(mx.take(part, mx.array(list(rows)), axis=2) for part in side.parts) for side in (k, v)]
        keys, values = (side.dequantize(part).astype(mx.float32) for side, part in zip((k, v), read, strict=True))
        query = queries[i : i + 1].astype(mx.float32)
        outs.append(mx.fast.scaled_dot_product_attention(query, keys, values, scale=scale))
    return mx.concatenate(outs).astype(queries.dtype)


@pytest.mark.parametrize("right", [True, False])
def test_a_kernel_that_is_right_is_all_that_is_looked_at_and_a_wrong_one_is_off(monkeypatch, right):
    wrong = lambda *given: portable_kernel(*given) * 1.5  # noqa: E731
    monkeypatch.setattr(checks, "try_kernel", lambda *given: PathCheck("kernel", True, 0.0))
    monkeypatch.setattr(checks, "available", lambda: True)
    monkeypatch.setattr(kernel, "attend_paged", portable_kernel if right else wrong)
    layout = KVLayout((LayerKV(2, 64, 64), LayerKV(2, 64, 64, Precision(8, 64), Precision(4, 32))), "bfloat16")
    assert wanted(layout, 16, 8).kernel
    found = {item.path: item for item in check_device(layout, 16, 8)}
    assert found["kernel"].ok == right
    assert set(found) == ({"kernel"} if right else {"kernel", "view", "fold", "table"})
    paths = narrowed(wanted(layout, 16, 8), list(found.values()), layout)
    assert paths.kernel == right


@pytest.mark.parametrize("side", [Precision(), Precision(4, 64)], ids=str)
def test_a_kernel_that_does_not_write_the_last_row_is_off(monkeypatch, side):
    forgets = lambda q, new, *given: portable_kernel(q, None, *given)  # noqa: E731
    monkeypatch.setattr(checks, "try_kernel", lambda *given: PathCheck("kernel", True, 0.0))
    monkeypatch.setattr(checks, "available", lambda: True)
    monkeypatch.setattr(kernel, "attend_paged", forgets)
    found = check_device(KVLayout((LayerKV(2, 64, 64, side, side),), "float16"), 32, 4, view=False)
    assert not next(item for item in found if item.path == "kernel").ok


def test_a_kernel_over_quantised_rows_that_ends_its_process_ends_a_child(monkeypatch):
    layout = KVLayout((LayerKV(2, 64, 64, Precision(8, 64), Precision(4, 32)),), "float16")
    monkeypatch.setattr(checks, "available", lambda: True)
    monkeypatch.setattr(kernel, "attend_paged", portable_kernel)
    dies = (sys.executable, "-c", "import os; os.abort()")
    real = checks.try_kernel
    monkeypatch.setattr(checks, "try_kernel", lambda *given: real(*given, dies))
    found = {item.path: item for item in check_device(layout, 32, 4, view=False)}
    assert not found["kernel"].ok and "child" in found["kernel"].reason and found["table"].ok
    asked = (sys.executable, "-c", "import sys; print(0.01 if sys.argv[1] == 'kernel' else 'nan')")
    assert real(layout, 32, 4, asked).ok
    told = json.dumps(["float16", 32, 4, [[2, 64, 64, 8, 64, 4, 32]]])
    assert checks.kernel_error(told) <= checks.TOLERANCE["float16"]


def test_updates_that_copy_the_pool_behind_a_step_in_line_end_the_looking_ahead(monkeypatch):
    net = model()
    cache = new_cache(net)
    _, sequence, _ = ask(net, cache, prompt(20))
    assert architecture.check_ahead(net, cache, sequence).ok
    moved = iter(range(1000))
    monkeypatch.setattr(architecture, "address", lambda array: next(moved))
    assert not architecture.check_ahead(net, cache, sequence).ok
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    report = check(net, inspect_layout(net), BLOCK, "llama")
    assert report.paths == replace(preferences("float32", BLOCK, on_cpu()), ahead=False)
