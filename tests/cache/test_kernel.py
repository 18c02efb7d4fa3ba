"""The CUDA kernel's text, run on the host: every thread of it a fiber of a C++ program. No GPU is needed."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from kvd.cache.kernel import takes
from kvd.cache.layout import NATIVE, KVLayout, LayerKV, Precision

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kvd" / "cache"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
WARPS = 2


@dataclass(frozen=True)
class Shape:
    """k, v: bits and group; (16, 0): halves."""

    kind: str
    dim: int
    v_dim: int
    repeats: int
    block: int
    k: tuple[int, int] = (16, 0)
    v: tuple[int, int] = (16, 0)

    @property
    def halves(self) -> bool:
        return self.k[0] == self.v[0] == 16

    def __str__(self) -> str:
        return f"{self.kind}-{self.dim}-{self.v_dim}x{self.repeats}-k{self.k[0]}v{self.v[0]}"


SHAPES = [
    Shape("bfloat16", 128, 128, 4, 32), Shape("float16", 64, 128, 8, 16), Shape("bfloat16", 32, 64, 1, 64),
    Shape("float16", 96, 64, 3, 256), Shape("bfloat16", 128, 128, 4, 32, (8, 64), (4, 64)),
    Shape("float16", 64, 64, 2, 16, (4, 32), (8, 32)), Shape("bfloat16", 128, 128, 8, 32, (2, 128), (16, 0)),
]  # fmt: skip
PROGRAM = """
#include "cuda_on_host.hpp"
#include "{kernel}"
using kvd::{T};
using K = kvd::Share<{T}, {D}, 4, {K}>;
using V = kvd::Share<{T}, {DV}, 8, {V}>;
// rows: all of a pool's, in bytes of a row; scales and biases: `groups` of a row.
kvd::Side<{T}> side(const char* rows, const {T}* scales, const {T}* biases, size_t above, int row_bytes, int groups) {{
  return {{rows + above * row_bytes, scales + above * groups, biases + above * groups}};
}}
extern "C" void attend(
    bool write, const {T}* q, char* k, const {T}* k_scales, const {T}* k_biases, int k_bytes, int k_groups, char* v,
    const {T}* v_scales, const {T}* v_biases, int v_bytes, int v_groups, const {T}* new_k, const {T}* new_v,
    const uint32_t* table, int width, int first, const int32_t* lengths, float scale, int pool_rows, int batch,
    int heads, int splits, float* scratch, unsigned* arrived, {T}* out) {{
  Block::run({{unsigned(splits), unsigned(heads), unsigned(batch)}}, {WARPS} * 32, [&] {{
    const size_t both = size_t(blockIdx.z) * heads + blockIdx.y, above = size_t(blockIdx.y) * pool_rows;
    kvd::attend<{T}, {D}, {DV}, {G}, {WARPS}, K, V>(
        q + both * {G} * {D}, side(k, k_scales, k_biases, above, k_bytes, k_groups),
        side(v, v_scales, v_biases, above, v_bytes, v_groups), write, new_k + both * {D}, new_v + both * {DV},
        table ? table + blockIdx.z * width : nullptr, {SHIFT}, first, lengths[blockIdx.z], scale, splits, blockIdx.x,
        scratch + both * splits * {G} * ({DV} + 2), arrived + both, out + both * {G} * {DV});
  }});
}}
"""


ROWS_PROGRAM = """
#include "cuda_on_host.hpp"
#include "{kernel}"
using Words = unsigned*;
using Halves = unsigned short*;
extern "C" void write_rows(const uint4* rows, uint4* pool, unsigned long long* done, int heads, int count, int per,
                           int height, int first) {{
  Block::run({{2}}, 32, [&] {{ kvd::write_rows<uint4>(rows, pool, done, heads, count, per, height, first); }});
}}
extern "C" void write_quantised(void* rows[6], void* pool[6], const int* at, int count, int heads, int height,
                                int k_words, int k_groups, int v_words, int v_groups) {{
  Block::run({{8}}, 32, [&] {{
    kvd::write_quantised(
        Words(rows[0]), Halves(rows[1]), Halves(rows[2]), Words(rows[3]), Halves(rows[4]), Halves(rows[5]),
        Words(pool[0]), Halves(pool[1]), Halves(pool[2]), Words(pool[3]), Halves(pool[4]), Halves(pool[5]), at, nullptr,
        count, heads, height, k_words, k_groups, v_words, v_groups);
  }});
}}
"""


def compiled(folder, program):
    """The library of a program that runs a kernel's text."""
    if COMPILER is None:
        pytest.skip("no C++ compiler: the kernel's text cannot be run here")
    source, library = folder / "kernel.cpp", folder / "kernel.so"
    source.write_text(program)
    command = [COMPILER, "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{HERE}", str(source), "-o", str(library)]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return ctypes.CDLL(str(library))


def pointer(array):
    return array.ctypes.data_as(ctypes.c_void_p)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """The library of a shape, made once."""

    @cache
    def build(shape):
        program = PROGRAM.format(
            kernel=KERNELS / "decode.cu", T=shape.kind, D=shape.dim, DV=shape.v_dim, G=shape.repeats,
            K="{}, {}".format(*shape.k), V="{}, {}".format(*shape.v), SHIFT=shape.block.bit_length() - 1, WARPS=WARPS,
        )  # fmt: skip
        return compiled(tmp_path_factory.mktemp("kernel"), program)

    return build


def test_rows_are_written_where_they_belong_and_nowhere_else(tmp_path):
    library = compiled(tmp_path, ROWS_PROGRAM.format(kernel=KERNELS / "rows.cu"))
    heads, height, count, per = 3, 20, 4, 2
    pool = np.arange(heads * height * per * 4, dtype=np.uint32).reshape(heads, height, per * 4)
    expected = pool.copy()
    rows = np.random.default_rng(1).integers(0, 1 << 32, (heads, count, per * 4), dtype=np.uint32)
    done = np.zeros(1, np.uint64)
    expected[:, 5 : 5 + count] = rows
    library.write_rows(pointer(rows), pointer(pool), pointer(done), heads, count, per, height, 5)
    assert (pool == expected).all() and done[0] == pool.ctypes.data

    kinds = [(4, np.uint32), (2, np.uint16), (2, np.uint16), (6, np.uint32), (1, np.uint16), (1, np.uint16)]
    rng = np.random.default_rng(2)
    rows = [rng.integers(0, 1 << 16, (count, heads, width)).astype(kind) for width, kind in kinds]
    pools = [rng.integers(0, 1 << 16, (heads, height, width)).astype(kind) for width, kind in kinds]
    expected = [array.copy() for array in pools]
    at = np.array([7, -1, 19, 0], np.int32)
    for array, row in zip(expected, rows, strict=True):
        for i in (0, 2, 3):
            array[:, at[i]] = row[i]
    pointers = [(ctypes.c_void_p * 6)(*(array.ctypes.data for array in arrays)) for arrays in (rows, pools)]
    library.write_quantised(*pointers, pointer(at), count, heads, height, 4, 2, 6, 1)
    assert all((array == wanted).all() for array, wanted in zip(pools, expected, strict=True))


def stored(kind, values):
    """Values as the kernel's type, and what they are then."""
    if kind == "float16":
        return values.astype(np.float16), values.astype(np.float16).astype(np.float32)
    bits = values.astype(np.float32).view(np.uint32) & 0xFFFF0000
    return (bits >> 16).astype(np.uint16), bits.view(np.float32)


def packed(kind, values, bits, group):
    """Values as the pool has them, as (rows, scales, biases) of raw numbers, and what they are then."""
    if bits == 16:
        raw, values = stored(kind, values)
        return [raw, raw, raw], values
    halves = mx.array(values.astype(np.float32)).astype(getattr(mx, kind))
    parts = mx.quantize(halves, group_size=group, bits=bits)
    plain = mx.dequantize(*parts, group_size=group, bits=bits).astype(mx.float32)
    return [np.array(part if part.dtype == mx.uint32 else part.view(mx.uint16)) for part in parts], np.array(plain)


def widened(kind, raw):
    if kind == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32)


@pytest.mark.parametrize(
    ("shape", "write"),  # rows of quantised KV are written before
    [(shape, write) for shape in SHAPES for write in ((True, False) if shape.halves else (False,))], ids=str,
)  # fmt: skip
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("lengths", [(1,), (16,), (70, 1), (64, 65, 128), (200, 33), (50, 0)], ids=str)
def test_it_attends_to_each_sequence_and_writes_its_last_row(build, shape, lengths, splits, write):
    library = build(shape)
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
    (q, q32), (nk, nk32), (nv, nv32) = (
        stored(kind, rng.standard_normal(size))
        for size in (
            (batch, heads, shape.repeats, shape.dim), (batch, heads, shape.dim), (batch, heads, shape.v_dim),
        )
    )  # fmt: skip
    k_parts, k32 = packed(kind, rng.standard_normal((heads, rows, shape.dim)), *shape.k)
    v_parts, v32 = packed(kind, rng.standard_normal((heads, rows, shape.v_dim)), *shape.v)
    k, v = k_parts[0], v_parts[0]
    scratch = np.full((batch * heads * splits * shape.repeats * (shape.v_dim + 2),), np.nan, np.float32)
    arrived = np.zeros(batch * heads, np.uint32)
    out = np.zeros((batch, heads, shape.repeats, shape.v_dim), q.dtype)
    counts = np.array(lengths, np.int32)
    scale = shape.dim**-0.5
    before = k.copy(), v.copy()

    at = pointer

    def side(parts):
        rows, scales, _ = parts
        return *map(at, parts), rows.shape[2] * rows.itemsize, scales.shape[2] if scales is not rows else 0

    library.attend(
        write, at(q), *side(k_parts), *side(v_parts), at(nk), at(nv), None if run else at(table), width, first,
        at(counts), ctypes.c_float(scale * np.log2(np.e)), rows, batch, heads, splits, at(scratch), at(arrived),
        at(out),
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


def layout(kv_heads=2, dim=64, dtype="bfloat16", k=NATIVE, v=NATIVE):
    return KVLayout((LayerKV(kv_heads, dim, dim, k, v),), dtype)


def test_it_is_offered_only_for_what_it_has_a_form_for():
    assert takes(layout(8, 128), 256, 32)
    assert takes(layout(2, 64, "float16"), 32, 16)
    assert not takes(layout(dtype="float32"), 256, 4), "not halves"
    assert not takes(layout(2, 64), 8, 16), "blocks of half a tile"
    assert not takes(layout(2, 80), 256, 8), "two and a half tiles a row"
    assert not takes(layout(2, 256), 256, 8), "too long a row for the registers"
    assert not takes(layout(1, 64), 256, 16), "sixteen query heads for a KV head"
    assert takes(layout(k=Precision(8, 64), v=Precision(4, 32)), 256, 8)
    assert not takes(layout(k=Precision(6, 64)), 256, 8), "digits over the borders of words"
    assert not takes(layout(2, 64, v=Precision(2, 32)), 256, 8), "half a word for a thread"
    assert not takes(layout(2, 96, k=Precision(4, 32)), 256, 8), "a thread's share over the border of a group"
    assert not takes(layout(), 96, 8), "blocks of no power of two"
    assert not takes(KVLayout((LayerKV(2, 64, 64), LayerKV(2, 96, 96)), "float16"), 256, 8), "one layer is enough"
