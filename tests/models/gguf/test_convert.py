"""Conversion of whole models: what MLX computes from the result is what the GGUF's weights say."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model, load_tokenizer

from kvclient.errors import UnsupportedModel
from kvd.models.gguf import types
from kvd.models.gguf.blocks import PACKED_BITS, dequantise
from kvd.models.gguf.convert import convert
from kvd.models.gguf.family import llama3_factors
from kvd.models.gguf.types import TensorType
from kvd.models.load import load
from tests.models.gguf.files import Tensors, float_tensor, gguf_bytes, model_metadata, model_tensors, tokenizer_metadata
from tests.tiny import Family, tiny_model

IDS = mx.array([[5, 300, 17, 42, 7, 301, 9, 250]])


def parts(folder: Path) -> tuple[dict[str, Any], Tensors]:
    """A tiny model's metadata and float32 tensors, ready for gguf_bytes."""
    tensors = {name: float_tensor(types.F32, array) for name, array in model_tensors(folder).items()}
    return model_metadata(folder) | tokenizer_metadata(folder), tensors


def converted(tmp_path: Path, metadata: dict[str, Any], tensors: Tensors) -> Path:
    source, folder = tmp_path / "m.gguf", tmp_path / "converted"
    folder.mkdir(parents=True, exist_ok=True)
    source.write_bytes(gguf_bytes(metadata, tensors))
    convert(source, folder)
    return folder


def logits(folder: Path) -> np.ndarray[Any, Any]:
    return np.array(load_model(folder)[0](IDS))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_float32_model_comes_through_bit_for_bit(tmp_path: Path, family: Family) -> None:
    original = tiny_model(tmp_path / "original", family)
    folder = converted(tmp_path, *parts(original))
    assert np.array_equal(logits(folder), logits(original))
    for text in ("the people of 世界 <|im_end|>", "  a\n\tb"):
        assert load_tokenizer(folder).encode(text) == load_tokenizer(original).encode(text)


def test_tied_embeddings_are_recognised(tmp_path: Path) -> None:
    original = tiny_model(tmp_path / "original", config={"tie_word_embeddings": True})
    metadata, tensors = parts(original)
    del tensors["output.weight"]
    assert np.array_equal(logits(converted(tmp_path, metadata, tensors)), logits(original))


KINDS = {
    "blk.0.attn_q": types.Q4_0, "blk.0.attn_k": types.Q4_1, "blk.0.attn_v": types.Q8_0, "blk.1.ffn_gate": types.Q4_K,
    "blk.1.ffn_down": types.Q6_K, "blk.1.ffn_up": types.Q5_0, "token_embd": types.Q8_0,
}  # fmt: skip


def quantised(shape: tuple[int, ...], kind: TensorType, random: np.random.Generator) -> np.ndarray[Any, Any]:
    """Random blocks with small scales: uint8 [rows, bytes]."""
    raw = random.integers(0, 256, (shape[0], shape[1] // kind.block, kind.size), np.uint8)
    for at in {"Q6_K": (208,), "Q4_K": (0, 2), "Q4_1": (0, 2)}.get(kind.name, (0,)):
        raw[..., at : at + 2] = np.frombuffer(np.float16(0.0011).tobytes(), np.uint8)
    return raw.reshape(shape[0], -1)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_quantised_types_mix_in_one_file_and_compute_what_their_blocks_say(tmp_path: Path, family: Family) -> None:
    """Q4_0, Q4_1 and Q8_0 without loss, the others rounded to float16."""
    metadata, tensors = parts(tiny_model(tmp_path / "original", family, heads=4, head_dim=64))
    random, plain = np.random.default_rng(3), dict(tensors)
    for base, kind in KINDS.items():
        shape = tensors[f"{base}.weight"][1]
        raw = quantised(shape, kind, random)
        values = dequantise(raw, kind)
        if kind not in PACKED_BITS:
            values = values.astype(np.float16).astype(np.float32)
        tensors[f"{base}.weight"] = (kind, shape, raw.tobytes())
        plain[f"{base}.weight"] = float_tensor(types.F32, values)
    folder = converted(tmp_path, metadata, tensors)
    assert json.loads((folder / "config.json").read_text())["quantization"]["bits"] in (4, 8)
    found = np.array(load(folder, "cpu").model(IDS))
    assert np.array_equal(found, logits(converted(tmp_path / "plain", metadata, plain)))


def test_llama_3s_rope_scaling_is_found_from_its_factors(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    original = tiny_model(tmp_path / "original", config={"rope_scaling": scaling, "rope_theta": 500000.0})
    metadata, tensors = parts(original)
    factors = llama3_factors(scaling, 32, 500000.0).astype(np.float32)
    assert factors[0] == 1.0 and factors[-1] == 32.0
    tensors["rope_freqs.weight"] = float_tensor(types.F32, factors)
    folder = converted(tmp_path, metadata, tensors)
    assert json.loads((folder / "config.json").read_text())["rope_scaling"] == scaling
    assert np.array_equal(logits(folder), logits(original))
    tensors["rope_freqs.weight"] = float_tensor(types.F32, factors**2)
    with pytest.raises(UnsupportedModel, match="rope_freqs"):
        converted(tmp_path, metadata, tensors)


def test_a_sliding_window_limits_the_context_to_what_is_exact(tmp_path: Path) -> None:
    metadata, tensors = parts(tiny_model(tmp_path / "original"))
    folder = converted(tmp_path, metadata | {"llama.attention.sliding_window": 512}, tensors)
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 512


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported, llama, qwen2, qwen3 are"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "rope scaling 'longrope'"),
        ({"llama.rope.dimension_count": 16}, "rope.dimension_count 16 differs"),
        ({"llama.attention.head_count_kv": [1, 2]}, "head_count_kv is per-layer values"),
        ({"llama.embedding_length": 0}, "embedding_length is 0"),
        ({"llama.block_count": 3}, "21 tensors for 3 layers"),
        ({"llama.block_count": (1 << 31) - 1}, "21 tensors for 2147483647 layers"),
        ({"llama.feed_forward_length": 999}, "ffn_gate.weight has shape"),
        ({"tokenizer.ggml.pre": "exotic"}, "pre-tokenizer 'exotic'"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer 't5'"),
        ({"tokenizer.ggml.tokens": []}, "no tokenizer"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    metadata, tensors = parts(tiny_model(tmp_path / "original"))
    with pytest.raises(UnsupportedModel, match=said):
        converted(tmp_path, metadata | change, tensors)


def test_tensors_without_a_place_and_values_without_end_are_refused(tmp_path: Path) -> None:
    metadata, tensors = parts(tiny_model(tmp_path / "original"))
    extra = tensors["blk.0.ffn_up.weight"]
    with pytest.raises(UnsupportedModel, match="ffn_gate_exps"):
        converted(tmp_path, metadata, {**tensors, "blk.0.ffn_gate_exps.weight": extra})
    with pytest.raises(UnsupportedModel, match="attn_q_norm.weight has no place in a llama model"):
        converted(tmp_path, metadata, {**tensors, "blk.0.attn_q_norm.weight": tensors["output_norm.weight"]})
    with pytest.raises(UnsupportedModel, match="tensor blk.1.ffn_up.weight is missing"):
        converted(tmp_path, metadata, {k: v for k, v in tensors.items() if k != "blk.1.ffn_up.weight"})
    rows, columns = extra[1]
    huge = np.zeros((rows, columns // 32, types.Q8_0.size), np.uint8)
    huge[..., :2] = np.frombuffer(np.float16(600).tobytes(), np.uint8)
    with pytest.raises(UnsupportedModel, match="ffn_up.weight holds values that are not finite"):
        converted(tmp_path, metadata, {**tensors, "blk.0.ffn_up.weight": (types.Q8_0, extra[1], huge.tobytes())})


def test_memory_stays_near_the_size_of_the_largest_tensor(tmp_path: Path) -> None:
    """2 million elements: 4 MB as float16, 30 MB and more if all were in between at once."""
    original = tiny_model(tmp_path / "original", heads=4, head_dim=64, config={"intermediate_size": 8192})
    config = json.loads((original / "config.json").read_text())
    shapes = {"ffn_gate": (8192, 256), "ffn_up": (8192, 256), "ffn_down": (256, 8192)}
    metadata, tensors = parts(original)
    assert config["intermediate_size"] == 8192
    random = np.random.default_rng(3)
    for layer in range(2):
        for name, shape in shapes.items():
            raw = quantised(shape, types.Q6_K, random)
            tensors[f"blk.{layer}.{name}.weight"] = (types.Q6_K, shape, raw.tobytes())
    source, folder = tmp_path / "m.gguf", tmp_path / "converted"
    source.write_bytes(gguf_bytes(metadata, tensors))
    folder.mkdir()
    heard: list[int] = []
    tracemalloc.start()
    try:
        convert(source, folder, heard.append)
        assert tracemalloc.get_traced_memory()[1] < 24 << 20
    finally:
        tracemalloc.stop()
    assert 0.95 * source.stat().st_size < sum(heard) <= source.stat().st_size
