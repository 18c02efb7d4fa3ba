import hashlib

import numpy as np
import pytest

from kvd.models.gguf import blocks, types
from kvd.models.gguf.types import TensorType

# First 16 hex digits of the SHA-256 of the float32 values that the package `gguf` 0.17 (by llama.cpp's authors) gives.
RECORDED = {
    "Q4_0": "8fbd3282abb26172",
    "Q4_1": "f4faca2a1fab9586",
    "Q5_0": "2d856f89703559a4",
    "Q5_1": "5dc27cd22c90550c",
    "Q8_0": "4aa068af75308a45",
    "Q2_K": "97dcc2326487e73b",
    "Q3_K": "2afbeb33c3bcc391",
    "Q4_K": "56543e784118bd74",
    "Q5_K": "2c7d9a6b09f97bf5",
    "Q6_K": "e3643d739e94f82c",
}
_HALVES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2),
}  # fmt: skip


def sample(kind: TensorType) -> blocks.Bytes:
    """4 rows of 3 blocks: bytes from a hash, except for the float16 fields, which get moderate values."""
    count = 12 * kind.size
    stream = b"".join(hashlib.sha256(f"{kind.name}{i}".encode()).digest() for i in range(count // 32 + 1))[:count]
    raw = np.frombuffer(stream, np.uint8).copy().reshape(4, 3, kind.size)
    for index, at in enumerate(_HALVES.get(kind.name, (0,))):
        halves = (np.arange(12, dtype=np.float32) - 5.5) * (-0.75 if index else 0.25)
        raw[..., at : at + 2] = halves.astype(np.float16).view(np.uint8).reshape(4, 3, 2)
    return raw.reshape(4, -1)


@pytest.mark.parametrize("name", RECORDED)
def test_every_type_dequantises_to_llama_cpps_values_bit_for_bit(name: str) -> None:
    values = blocks.dequantise(sample(getattr(types, name)), getattr(types, name))
    assert values.dtype == np.float32
    assert hashlib.sha256(values.tobytes()).hexdigest()[:16] == RECORDED[name]


@pytest.mark.parametrize("kind", blocks.PACKED_BITS, ids=lambda kind: kind.name)
def test_mlx_reads_a_packed_tensor_as_the_same_values(kind: TensorType) -> None:
    import mlx.core as mx

    raw = sample(kind)
    words, scales, biases = (mx.array(part) for part in blocks.pack(raw, kind))
    found = mx.dequantize(
        words, scales.astype(mx.float32), biases.astype(mx.float32), group_size=32, bits=blocks.PACKED_BITS[kind]
    )
    assert np.array_equal(np.array(found), blocks.dequantise(raw, kind))
