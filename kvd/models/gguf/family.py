"""GGUF metadata to the config of an MLX model: the families llama, qwen2 and qwen3.

Field names follow the GGUF specification ("<architecture>.<key>"); what has no counterpart is refused by
name rather than ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvd.models.gguf.reader import GGUF, TensorInfo, refuse

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_FREQS = "rope_freqs.weight"

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_PLAIN = re.compile(r"(\w+)\.(weight)")


def mlx_name(tensor: str) -> str | None:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; None when there is no such module."""
    if match := _BLOCK.fullmatch(tensor):
        module = _LAYER.get(match[2])
        return module and f"model.layers.{int(match[1])}.{module}.{match[3]}"
    if match := _PLAIN.fullmatch(tensor):
        module = _TOP.get(match[1])
        return module and f"{module}.{match[2]}"
    return None


def row_order(config: dict[str, Any], tensor: str) -> NDArray[np.intp] | None:
    """Row permutation that undoes GGUF's interleaved-RoPE order of llama's q and k, or None.

    GGUF stores head rows as (0, d/2, 1, d/2+1, ...); MLX's rope wants (0, 1, ..., d/2, d/2+1, ...). qwen files
    are stored unpermuted.
    """
    match = _BLOCK.fullmatch(tensor)
    if config["model_type"] != "llama" or not match or match[2] not in ("attn_q", "attn_k"):
        return None
    heads = config["num_attention_heads" if match[2] == "attn_q" else "num_key_value_heads"]
    rows = np.arange(heads * config["head_dim"])
    return np.ascontiguousarray(rows.reshape(heads, -1, 2).swapaxes(1, 2)).reshape(-1)


class _Fields:
    """Typed access to `<architecture>.*`, with errors that name the file and the key."""

    def __init__(self, gguf: GGUF, architecture: str) -> None:
        self.gguf, self.prefix = gguf, architecture + "."

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        value = self.gguf.metadata.get(self.prefix + key, default)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            shown = "per-layer values" if isinstance(value, list) else repr(value)
            raise refuse(self.gguf.path, f"{self.prefix}{key} is {shown}, which is not supported")
        return value

    def need(self, key: str) -> int:
        value = self.get(key, int)
        if value is None or not 0 < value < 1 << 31:
            raise refuse(self.gguf.path, f"damaged: {self.prefix}{key} is {value!r}, a positive number is needed")
        return int(value)


def model_config(gguf: GGUF, rope_freqs: Callable[[TensorInfo], NDArray[np.float32]]) -> dict[str, Any]:
    """config.json of the file, quantisation and token ids left out. `rope_freqs` reads that one tensor.

    Raises UnsupportedModel naming the architecture, key or tensor that has no MLX counterpart here.
    """
    architecture = gguf.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise refuse(
            gguf.path, f"architecture {architecture!r} is not supported, {known} are", architecture=str(architecture)
        )
    for name in gguf.tensors:
        if mlx_name(name) is None and name != ROPE_FREQS:
            raise refuse(gguf.path, f"architecture {architecture!r} with tensor {name} is not supported", tensor=name)
    fields = _Fields(gguf, architecture)
    heads, hidden = fields.need("attention.head_count"), fields.need("embedding_length")
    head_dim = fields.get("attention.key_length", int, hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := fields.get(key, int, head_dim)) != head_dim:
            raise refuse(gguf.path, f"{architecture}.{key} {other} differs from the head size {head_dim}")
    if architecture == "qwen2" and head_dim * heads != hidden:
        raise refuse(gguf.path, f"head size {head_dim} x {heads} heads differs from the hidden size {hidden}")
    context = fields.need("context_length")
    if window := fields.get("attention.sliding_window", int, 0):
        context = min(context, window)  # exact up to there: plain attention and a window agree
    rope_theta = float(fields.get("rope.freq_base", (int, float), 10000.0))
    scaling = _rope_scaling(fields, context)
    if ROPE_FREQS in gguf.tensors:
        scaling = _llama3_scaling(gguf, rope_freqs(gguf.tensors[ROPE_FREQS]), head_dim, rope_theta)
    return {
        "model_type": architecture,
        "architectures": [ARCHITECTURES[architecture]],
        "hidden_size": hidden,
        "intermediate_size": fields.need("feed_forward_length"),
        "num_hidden_layers": fields.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": float(fields.get("attention.layer_norm_rms_epsilon", (int, float), 1e-5)),
        "rope_theta": rope_theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "vocab_size": _vocabulary(gguf),
        "torch_dtype": "float16",
    }


def _vocabulary(gguf: GGUF) -> int:
    tensor = gguf.tensors.get("token_embd.weight")
    if tensor is None:
        raise refuse(gguf.path, "no weights: tensor token_embd.weight is missing")
    return tensor.shape[0]


def _rope_scaling(fields: _Fields, context: int) -> dict[str, Any] | None:
    kind = fields.get("rope.scaling.type", str, "none")
    factor = float(fields.get("rope.scaling.factor", (int, float), 1.0))
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = fields.get("rope.scaling.original_context_length", int, int(context / factor))
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise refuse(fields.gguf.path, f"rope scaling {kind!r} is not supported")


def llama3_factors(scaling: dict[str, Any], head_dim: int, theta: float) -> NDArray[np.float64]:
    """By how much Llama 3's rule lengthens each of the head_dim / 2 wavelengths."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / scaling["factor"] + smooth))


def _llama3_scaling(gguf: GGUF, found: NDArray[np.float32], head_dim: int, theta: float) -> dict[str, Any]:
    """GGUF stores only the resulting factors: find the published rule that gives them."""
    factors = np.asarray(found, np.float64).reshape(-1)
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if len(factors) != head_dim // 2 or not np.allclose(factors, llama3_factors(scaling, head_dim, theta), rtol=1e-3):
        raise refuse(gguf.path, f"tensor {ROPE_FREQS} holds factors that no supported rope scaling gives")
    return scaling
