"""Writing GGUF files for tests: any metadata and tensors, and tiny models in llama.cpp's layout."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from kvd.models.gguf.types import READABLE, TensorType

Tensors = dict[str, tuple[TensorType, tuple[int, ...], bytes]]
_NUMBERS = {kind: number for number, kind in READABLE.items()}


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """Type number and value; integers as u32 (negative ones and those of arrays as i32), floats as f32."""
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        return struct.pack("<Ii", 5, item) if item < 0 else struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, str):
        return struct.pack("<I", 8) + text(item)
    if item and all(type(entry) is int for entry in item):
        return struct.pack(f"<IIQ{len(item)}i", 9, 5, len(item), *item)
    inner = [value(entry) for entry in item]
    kind = inner[0][:4] if inner else struct.pack("<I", 4)
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(inner)) + b"".join(entry[4:] for entry in inner)


def gguf_bytes(metadata: dict[str, Any], tensors: Tensors, version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(text(key) + value(item) for key, item in metadata.items())
    at, body = 0, b""
    for name, (kind, shape, data) in tensors.items():
        head += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", _NUMBERS[kind], at)
        body += data + b"\0" * (-len(data) % 32)
        at = len(body)
    return head + b"\0" * (-len(head) % 32) + body


def float_tensor(kind: TensorType, array: np.ndarray[Any, Any]) -> tuple[TensorType, tuple[int, ...], bytes]:
    dtype = np.float32 if kind.name == "F32" else np.float16
    return kind, array.shape, array.astype(dtype).tobytes()


def tokenizer_metadata(folder: Path) -> dict[str, Any]:
    """The tiny models' tokenizer as GGUF describes it."""
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": template,
    }


def model_metadata(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    arch = config["model_type"]
    return {
        "general.architecture": arch,
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": config["head_dim"],
        f"{arch}.attention.value_length": config["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": config["rope_theta"],
    }


_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def ggml_name(name: str) -> str:
    base, _, kind = name.rpartition(".")
    if base in _TOP:
        return f"{_TOP[base]}.{kind}"
    _, _, layer, module = base.split(".", 3)
    return f"blk.{layer}.{_LAYER[module]}.{kind}"


def model_tensors(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The model's weights under GGUF's names, llama's q and k rows in the order that interleaved RoPE wants."""
    config = json.loads((folder / "config.json").read_text())
    tensors = {}
    for name, array in load_file(folder / "model.safetensors").items():
        module = name.split(".")[-2]
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(module)
        if heads and config["model_type"] == "llama":
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        tensors[ggml_name(name)] = array
    return tensors
