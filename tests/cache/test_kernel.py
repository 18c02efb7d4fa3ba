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
WARPS = 2


@dataclass(frozen=True)
class Shape:
    kind: str
    dim: int
    v_dim: int
    repeats: int
    block: int


SHAPES = [
    Shape("bfloat16", 128, 128, 4, 32), Shape("float16", 64, 128, 8, 16), Shape("bfloat16", 32, 64, 1, 64),
    Shape("float16", 96, 64, 3, 256),
]  # fmt: skip
PROGRAM = """
#include "cuda_on_host.hpp"
#include "{kernel}"
using kvd::{T};
extern "C" void attend(bool write, const {T}* q, {T}* k, {T}* v, const {T}* new_k, const {T}* new_v,
                       const uint32_t* table, int width, int first, const int32_t* lengths, float scale, int pool_rows,
                       int batch, int heads, int splits, float* scratch, unsigned* arrived, {T}* out) {{
  Block::run({{unsigned(splits), unsigned(heads), unsigned(batch)}}, {WARPS} * 32, [&] {{
    const size_t both = size_t(blockIdx.z) * heads + blockIdx.y;
    kvd::attend<{T}, {D}, {DV}, {G}, {WARPS}>(
        q + both * {G} * {D}, k + size_t(blockIdx.y) * pool_rows * {D}, v + size_t(blockIdx.y) * pool_rows * {DV},
        write, new_k + both * {D}, new_v + both * {DV}, table ? table + blockIdx.z * width : nullptr, {SHIFT}, first,
        lengths[blockIdx.z], scale, splits, blockIdx.x, scratch + both * splits * {G} * ({DV} + 2), arrived + both,
        out + both * {G} * {DV});
  }});
}}
"""


@pytest.fixture(scope="module", params=SHAPES, ids=lambda s: f"{s.kind}-{s.dim}-{s.v_dim}x{s.repeats}")
def built(request, tmp_path_factory):
    if COMPILER is None:
        pytest.skip("no C++ compiler: the kernel's text cannot be run here")
    shape = request.param
    folder = tmp_path_factory.mktemp("kernel")
    source, library = folder / "kernel.cpp", folder / "kernel.so"
    source.write_text(
        PROGRAM.format(
            kernel=HERE.parents[1] / "kvd" / "cache" / "decode.cu", T=shape.kind, D=shape.dim, DV=shape.v_dim,
            G=shape.repeats, SHIFT=shape.block.bit_length() - 1, WARPS=WARPS,
        )
    )  # fmt: skip
    command = [COMPILER, "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{HERE}", str(source), "-o", str(library)]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return shape, ctypes.CDLL(str(library))


def stored(kind, values):
    """Values as the kernel's type, and what they are then."""
    if kind == "float16":
        return values.astype(np.float16), values.astype(np.float16).astype(np.float32)
    bits = values.astype(np.float32).view(np.uint32) & 0xFFFF0000
    return (bits >> 16).astype(np.uint16), bits.view(np.float32)


def widened(kind, raw):
    if kind == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32)


@pytest.mark.parametrize("write", [True, False], ids=["write", "stored"])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("lengths", [(1,), (16,), (70, 1), (64, 65, 128), (200, 33), (50, 0)], ids=str)
def test_it_attends_to_each_sequence_and_writes_its_last_row(built, lengths, splits, write):
    shape, library = built
    rng = np.random.default_rng(sum(lengths))
    heads, batch, block, kind = 2, len(lengths), shape.block, shape.kind
    width = max(-(-n // block) for n in lengths)
    blocks = batch * width + 2
    rows = blocks * block
    run = batch == 1
    first = 3 if run else 0
    order = rng.permutation(blocks).astype(np.uint32)
    table = np.zeros((batch, width), np.uint32)
    for i, n in enumerate(lengths):
        used = -(-n // block)
        table[i, :used] = order[i * width : i * width + used]
    (q, q32), (k, k32), (v, v32), (nk, nk32), (nv, nv32) = (
        stored(kind, rng.standard_normal(size))
        for size in (
            (batch, heads, shape.repeats, shape.dim), (heads, rows, shape.dim), (heads, rows, shape.v_dim),
            (batch, heads, shape.dim), (batch, heads, shape.v_dim),
        )
    )  # fmt: skip
    scratch = np.full((batch * heads * splits * shape.repeats * (shape.v_dim + 2),), np.nan, np.float32)
    arrived = np.zeros(batch * heads, np.uint32)
    out = np.zeros((batch, heads, shape.repeats, shape.v_dim), q.dtype)
    counts = np.array(lengths, np.int32)
    scale = shape.dim**-0.5
    before = k.copy(), v.copy()

    def at(array):
        return array.ctypes.data_as(ctypes.c_void_p)

    library.attend(
        write, at(q), at(k), at(v), at(nk), at(nv), None if run else at(table), width, first, at(counts),
        ctypes.c_float(scale * np.log2(np.e)), rows, batch, heads, splits, at(scratch), at(arrived), at(out),
    )  # fmt: skip
    assert not arrived.any()
    found = widened(kind, out)
    for i, n in enumerate(lengths):
        if not n:
            assert not found[i].any()
            continue
        read = np.concatenate([np.arange(b * block, (b + 1) * block) for b in table[i]])[:n]
        if run:
            read = np.arange(first, first + n)
        if write:
            k32[:, read[-1]], v32[:, read[-1]] = nk32[i], nv32[i]
            before[0][:, read[-1]], before[1][:, read[-1]] = nk[i], nv[i]
        scores = np.einsum("hgd,hrd->hgr", q32[i] * scale, k32[:, read])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        wanted = np.einsum("hgr,hrd->hgd", weights / weights.sum(-1, keepdims=True), v32[:, read])
        limit = 4e-3 if kind == "float16" else 2e-2
        assert np.abs(found[i] - wanted).max() <= limit * np.abs(wanted).max()
    assert (k == before[0]).all() and (v == before[1]).all(), "a row was written that is not the last of a sequence"


def layout(kv_heads=2, dim=64, dtype="bfloat16", k=None):
    return KVLayout((LayerKV(kv_heads, dim, dim, k or Precision(), Precision()),), dtype)


def test_it_is_offered_only_for_what_it_has_a_form_for():
    assert takes(layout(8, 128), 256, 32)
    assert takes(layout(2, 64, "float16"), 32, 16)
    assert not takes(layout(dtype="float32"), 256, 4), "not halves"
    assert not takes(layout(2, 64), 8, 16), "blocks of half a tile"
    assert not takes(layout(2, 80), 256, 8), "two and a half tiles a row"
    assert not takes(layout(2, 256), 256, 8), "too long a row for the registers"
    assert not takes(layout(1, 64), 256, 16), "sixteen query heads for a KV head"
    assert not takes(layout(k=Precision(8, 64)), 256, 8), "quantised"
    assert not takes(KVLayout((LayerKV(2, 64, 64), LayerKV(2, 96, 96)), "float16"), 256, 8), "one layer is enough"
