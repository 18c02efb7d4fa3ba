"""The CUDA kernel's text, run on the host: every thread of it a fiber of a C++ program. No GPU is needed."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvd.cache.kernel import takes
from kvd.cache.layout import KVLayout, LayerKV, Precision

HERE = Path(__file__).parent
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


@dataclass(frozen=True)
class Shape:
    kind: str
    dim: int
    v_dim: int
    repeats: int
    block: int
    split: int
    parts: int = 4


SHAPES = [
    Shape("float", 64, 64, 3, 16, 64),
    Shape("float", 32, 64, 1, 64, 32),
    Shape("__nv_bfloat16", 128, 128, 4, 32, 32),
    Shape("__half", 64, 128, 8, 16, 64, 2),
]
PROGRAM = """
#include "cuda_on_host.hpp"
#include "{kernel}"
extern "C" void attend(const {T}* q, const {T}* k, const {T}* v, const uint32_t* table, const int32_t* lengths,
                       float scale, int pool_rows, int width, int batch, int heads, int splits,
                       float* partial, float* stats, {T}* out) {{
  Block::run({{unsigned(batch * splits), unsigned(heads), 1}}, 128, [&] {{
    kvd::attend_split<{T}, {D}, {DV}, {G}, {BLOCK}, {SPLIT}, 4>(
        q, k, v, table, lengths, scale, pool_rows, width, batch, partial, stats);
  }});
  Block::run({{{G}, unsigned(heads), unsigned(batch)}}, {PARTS} * {DV}, [&] {{
    kvd::join_splits<{T}, {DV}, {G}, {SPLIT}, {PARTS}>(partial, stats, lengths, splits, out);
  }});
}}
"""


@pytest.fixture(scope="module", params=SHAPES, ids=lambda s: f"{s.kind}-{s.dim}-{s.v_dim}x{s.repeats}")
def built(request, tmp_path_factory):
    if COMPILER is None:
        pytest.skip("no C++ compiler: the kernel's text cannot be run here")
    shape = request.param
    folder = tmp_path_factory.mktemp("kernel")
    kernel = HERE.parents[1] / "kvd" / "cache" / "decode.cu"
    source = folder / "kernel.cpp"
    source.write_text(
        PROGRAM.format(
            kernel=kernel, T=shape.kind, D=shape.dim, DV=shape.v_dim, G=shape.repeats, BLOCK=shape.block,
            SPLIT=shape.split, PARTS=shape.parts,
        )  # fmt: skip
    )
    library = folder / "kernel.so"
    command = [COMPILER, "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{HERE}", str(source), "-o", str(library)]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return shape, ctypes.CDLL(str(library))


def stored(kind, values):
    """Values as the kernel's type, and what they are then."""
    if kind == "float":
        return values.astype(np.float32), values.astype(np.float32)
    if kind == "__half":
        return values.astype(np.float16), values.astype(np.float16).astype(np.float32)
    bits = values.astype(np.float32).view(np.uint32) & 0xFFFF0000
    return (bits >> 16).astype(np.uint16), bits.view(np.float32)


def widened(kind, raw):
    if kind == "__nv_bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32)


@pytest.mark.parametrize("lengths", [(1,), (70, 1), (64, 65, 128), (200, 33)], ids=str)
def test_it_attends_to_the_rows_of_each_block_table(built, lengths):
    shape, library = built
    rng = np.random.default_rng(len(lengths) + lengths[0])
    heads, batch, block = 2, len(lengths), shape.block
    width = max(-(-n // block) for n in lengths)
    blocks = batch * width + 2
    order = rng.permutation(blocks).astype(np.uint32)
    table = np.zeros((batch, width), np.uint32)
    for i, n in enumerate(lengths):
        used = -(-n // block)
        table[i, :used] = order[i * width : i * width + used]
    rows = blocks * block
    (q, q32), (k, k32), (v, v32) = (
        stored(shape.kind, rng.standard_normal(size))
        for size in (
            (batch, heads, shape.repeats, shape.dim), (heads, rows, shape.dim), (heads, rows, shape.v_dim)
        )
    )  # fmt: skip
    splits = -(-max(lengths) // shape.split)
    partial = np.full((batch, heads, splits, shape.repeats, shape.v_dim), np.nan, np.float32)
    stats = np.full((batch, heads, splits, shape.repeats, 2), np.nan, np.float32)
    out = np.zeros((batch, heads, shape.repeats, shape.v_dim), q.dtype)
    counts = np.array(lengths, np.int32)
    scale = shape.dim**-0.5

    def at(array):
        return array.ctypes.data_as(ctypes.c_void_p)

    library.attend(
        at(q), at(k), at(v), at(table), at(counts), ctypes.c_float(scale * np.log2(np.e)), rows, width, batch, heads,
        splits, at(partial), at(stats), at(out),
    )  # fmt: skip
    found = widened(shape.kind, out)
    for i, n in enumerate(lengths):
        read = np.concatenate([np.arange(b * block, (b + 1) * block) for b in table[i]])[:n]
        scores = np.einsum("hgd,hrd->hgr", q32[i] * scale, k32[:, read])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        wanted = np.einsum("hgr,hrd->hgd", weights / weights.sum(-1, keepdims=True), v32[:, read])
        limit = {"float": 1e-5, "__half": 2e-3, "__nv_bfloat16": 1e-2}[shape.kind]
        assert np.abs(found[i] - wanted).max() <= limit * np.abs(wanted).max()


def layout(kv_heads=2, dim=64, dtype="bfloat16", k=None):
    return KVLayout((LayerKV(kv_heads, dim, dim, k or Precision(), Precision()),), dtype)


def test_it_is_offered_only_for_what_it_has_a_form_for():
    assert takes(layout(8, 128), 256, 32)
    assert not takes(layout(dim=256, dtype="float32"), 256, 4), "64 loads a row"
    assert takes(layout(2, 64), 32, 16)
    assert not takes(layout(2, 80), 256, 8), "ten loads a row"
    assert not takes(layout(1, 64), 256, 16), "sixteen query heads for a KV head"
    assert not takes(layout(k=Precision(8, 64)), 256, 8), "quantised"
    assert not takes(KVLayout((LayerKV(2, 64, 64), LayerKV(2, 96, 64)), "float16"), 256, 8), "one layer is enough"
