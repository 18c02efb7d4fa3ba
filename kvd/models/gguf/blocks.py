"""GGML blocks to numbers: dequantised, or repacked as MLX's affine groups of 32 without loss.

MLX stores `w = scale * q + bias` with unsigned q; element i of a row sits in bits [b*i, b*(i+1)) of the row's
little-endian words. GGML stores a block of 32 as: Q4_0 `d * (q - 8)`, Q4_1 `d * q + m`, Q8_0 `d * q` with signed q;
in the 4-bit types the low nibbles of the 16 bytes are elements 0..15 and the high ones 16..31.
The layouts of the K-quants follow ggml-common.h: super-blocks of 256 with 6-bit (or 4-bit) sub-block scales.

All functions take `raw`: uint8 [rows, blocks_per_row * block bytes].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvd.models.gguf import types
from kvd.models.gguf.types import TensorType

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Packed = tuple[NDArray[np.uint32], NDArray[np.float16], NDArray[np.float16]]


def _halves(column: Bytes) -> Floats:
    """float16 bytes [..., 2] -> float32 [..., 1]"""
    return np.ascontiguousarray(column).view(np.float16).astype(np.float32)


def _nibbles(qs: Bytes) -> Bytes:
    """[..., 16] -> [..., 32]: low nibbles first, then high ones."""
    return np.concatenate([qs & 15, qs >> 4], axis=-1)


def pack(raw: Bytes, kind: TensorType) -> Packed:
    """MLX words, scales and biases of a Q4_0, Q4_1 or Q8_0 tensor, exactly the same values.

    words [rows, columns * bits / 32], scales and biases [rows, columns / 32]. A bias can leave float16's range only
    for |d| > 511, which `convert` refuses.
    """
    rows = raw.shape[0]
    blocks = raw.reshape(rows, -1, kind.size)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
    if kind is types.Q8_0:
        biases = scales * np.float16(-128)
        codes = blocks[..., 2:] ^ 128  # signed q + 128
    else:
        start = 4 if kind is types.Q4_1 else 2
        if kind is types.Q4_1:
            biases = np.ascontiguousarray(blocks[..., 2:4]).view(np.float16)[..., 0]
        else:
            biases = scales * np.float16(-8)
        values = _nibbles(blocks[..., start:])
        codes = values[..., 0::2] | values[..., 1::2] << 4
    words = np.ascontiguousarray(codes).reshape(rows, -1).view(np.uint32)
    return words, np.ascontiguousarray(scales), np.ascontiguousarray(biases)


PACKED_BITS = {types.Q4_0: 4, types.Q4_1: 4, types.Q8_0: 8}
"""Types that MLX can hold as they are, and their bits."""


def _q4_0(b: Bytes) -> Floats:
    return _halves(b[..., :2]) * (_nibbles(b[..., 2:]).astype(np.float32) - 8)


def _q4_1(b: Bytes) -> Floats:
    return _halves(b[..., :2]) * _nibbles(b[..., 4:]) + _halves(b[..., 2:4])


def _q8_0(b: Bytes) -> Floats:
    return _halves(b[..., :2]) * b[..., 2:].view(np.int8)


def _fifth_bits(four: Bytes) -> Bytes:
    """[..., 4] -> [..., 32]: bit i of the little-endian word, as 0 or 16."""
    return np.unpackbits(four, axis=-1, bitorder="little") * np.uint8(16)


def _q5_0(b: Bytes) -> Floats:
    return _halves(b[..., :2]) * ((_nibbles(b[..., 6:]) | _fifth_bits(b[..., 2:6])).astype(np.float32) - 16)


def _q5_1(b: Bytes) -> Floats:
    return _halves(b[..., :2]) * (_nibbles(b[..., 8:]) | _fifth_bits(b[..., 4:8])) + _halves(b[..., 2:4])


def _pairs(qs: Bytes, shifts: tuple[int, ...], mask: int, run: int) -> Bytes:
    """Runs of `run` bytes, each giving one run of values per shift, in order: [..., n] -> [..., n * len(shifts)]."""
    runs = qs.reshape(*qs.shape[:-1], -1, 1, run)
    values = np.right_shift(runs, np.array(shifts, np.uint8).reshape(-1, 1)) & np.uint8(mask)
    return np.asarray(values.reshape(*qs.shape[:-1], -1), np.uint8)


def _sub_blocks(codes: NDArray[np.generic], scales: NDArray[np.generic]) -> Floats:
    """codes [..., 256] times one scale per sub-block [..., n], as [..., n, 256/n]."""
    parts = codes.astype(np.float32).reshape(*codes.shape[:-1], scales.shape[-1], -1)
    return np.asarray(parts * scales.astype(np.float32)[..., None], np.float32)


def _q2_k(b: Bytes) -> Floats:
    packed, d, low = b[..., :16], _halves(b[..., 80:82]), _halves(b[..., 82:84])
    codes = _pairs(b[..., 16:80], (0, 2, 4, 6), 3, 32)
    values = _sub_blocks(codes, d * (packed & 15)) - (low * (packed >> 4))[..., None]
    return values.reshape(codes.shape)


def _q3_k(b: Bytes) -> Floats:
    high, packed, d = b[..., :32], b[..., 96:108], _halves(b[..., 108:110])
    low4 = np.concatenate([packed[..., :8] & 15, packed[..., :8] >> 4], axis=-1)
    high2 = _pairs(packed[..., 8:], (0, 2, 4, 6), 3, 4)
    scales = (low4 | high2 << 4).astype(np.float32) - 32
    bits = _pairs(high, (0, 1, 2, 3, 4, 5, 6, 7), 1, 32)
    codes = _pairs(b[..., 32:96], (0, 2, 4, 6), 3, 32).astype(np.float32) - 4 * (1 - bits.astype(np.float32))
    return _sub_blocks(codes, d * scales).reshape(codes.shape)


def _six_bit_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The 12 bytes of Q4_K and Q5_K: eight 6-bit scales and eight 6-bit minima."""
    a, m, both = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([a & 63, (both & 15) | (a >> 6) << 4], axis=-1)
    minima = np.concatenate([m & 63, both >> 4 | (m >> 6) << 4], axis=-1)
    return scales, minima


def _q4_k(b: Bytes) -> Floats:
    scales, minima = _six_bit_scales(b[..., 4:16])
    codes = _pairs(b[..., 16:], (0, 4), 15, 32)
    values = _sub_blocks(codes, _halves(b[..., :2]) * scales) - (_halves(b[..., 2:4]) * minima)[..., None]
    return values.reshape(codes.shape)


def _q5_k(b: Bytes) -> Floats:
    scales, minima = _six_bit_scales(b[..., 4:16])
    high = _pairs(b[..., 16:48], (0, 1, 2, 3, 4, 5, 6, 7), 1, 32)
    codes = _pairs(b[..., 48:], (0, 4), 15, 32) | high << 4
    values = _sub_blocks(codes, _halves(b[..., :2]) * scales) - (_halves(b[..., 2:4]) * minima)[..., None]
    return values.reshape(codes.shape)


def _q6_k(b: Bytes) -> Floats:
    scales, d = b[..., 192:208].view(np.int8), _halves(b[..., 208:210])
    low = _pairs(b[..., :128], (0, 4), 15, 64)
    high = _pairs(b[..., 128:192], (0, 2, 4, 6), 3, 32)
    codes = (low | high << 4).astype(np.float32) - 32
    return _sub_blocks(codes, d * scales).reshape(codes.shape)


_DEQUANTISE: dict[TensorType, Callable[[Bytes], Floats]] = {
    types.Q4_0: _q4_0, types.Q4_1: _q4_1, types.Q5_0: _q5_0, types.Q5_1: _q5_1, types.Q8_0: _q8_0,
    types.Q2_K: _q2_k, types.Q3_K: _q3_k, types.Q4_K: _q4_k, types.Q5_K: _q5_k, types.Q6_K: _q6_k,
}  # fmt: skip


def dequantise(raw: Bytes, kind: TensorType) -> Floats:
    """float32 [rows, columns] of any quantised type, as llama.cpp's reference dequantisation gives it."""
    blocks = raw.reshape(raw.shape[0], -1, kind.size)
    return _DEQUANTISE[kind](blocks).reshape(raw.shape[0], -1)
