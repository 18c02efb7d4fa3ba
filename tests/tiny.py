"""Tiny models with random weights and a real tokenizer, made in milliseconds: what most tests run on.

The same arguments give the same bytes, in any process. Weights are scaled so that greedy text is not
degenerate and the first token usually leads the second by far more than rounding.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

Family = Literal["llama", "qwen2", "qwen3"]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
WORDS = """the of and a to in is you that it he was for on are as with his they I at be this have from or one had by
word but not what all were we when your can said there use an each which she do how their if will up other about out
many then them these so some her would make like him into time has look two more write go see number no way could
people my than first water been call who oil its now find long down day did get come made may part over new sound take
only little work know place year live me back give most very after thing our just name good sentence man think say
great where help through much before line right too mean old any same tell boy follow came want show also around form
three small set put end does another well large must big even such because turn here why ask went men read need land"""


def tiny_model(
    folder: Path,
    family: Family = "llama",
    *,
    seed: int = 0,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    context: int = 4096,
    vocab: int = 512,
    dtype: Literal["float32", "float16"] = "float32",
    config: dict[str, Any] | None = None,
) -> Path:
    """Write an MLX model folder (config, model.safetensors, tokenizer) and return it.

    hidden size = heads * head_dim; `vocab` counts the three special tokens (>= 300); `config` overrides entries.
    """
    folder.mkdir(parents=True, exist_ok=True)
    hidden = heads * head_dim
    inner = 2 * hidden
    settings = {
        "model_type": family,
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": 0,
        "eos_token_id": 2,
        **(config or {}),
    }
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return np.asarray(random.standard_normal((rows, columns), dtype=np.float32) * (gain / columns**0.5), dtype)

    def vector(size: int, around: float) -> np.ndarray:
        return (around + 0.1 * random.standard_normal(size, dtype=np.float32)).astype(dtype)

    weights = {
        "model.embed_tokens.weight": matrix(vocab, hidden, hidden**0.5),
        "model.norm.weight": vector(hidden, 1.0),
        "lm_head.weight": matrix(vocab, hidden, 3.0),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}."
        weights[at + "input_layernorm.weight"] = vector(hidden, 1.0)
        weights[at + "post_attention_layernorm.weight"] = vector(hidden, 1.0)
        for name, width in (("q", hidden), ("k", kv_heads * head_dim), ("v", kv_heads * head_dim)):
            weights[at + f"self_attn.{name}_proj.weight"] = matrix(width, hidden, 1.5)
            if family == "qwen2":
                weights[at + f"self_attn.{name}_proj.bias"] = vector(width, 0.0)
        weights[at + "self_attn.o_proj.weight"] = matrix(hidden, hidden)
        if family == "qwen3":
            weights[at + "self_attn.q_norm.weight"] = vector(head_dim, 1.0)
            weights[at + "self_attn.k_norm.weight"] = vector(head_dim, 1.0)
        for name, (rows, columns) in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
            weights[at + f"mlp.{name}_proj.weight"] = matrix(rows, columns)
    save_file(weights, folder / "model.safetensors", metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(settings, indent=1))
    tiny_tokenizer(folder, vocab)
    return folder


@cache
def _tokenizer_json(vocab: int) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Each word a different number of times, so that no merge is decided by a tie.
    corpus = [" ".join([f" {word}"] * (1000 - index)) for index, word in enumerate(WORDS.split())]
    tokenizer.train_from_iterator(corpus, trainer)
    return str(tokenizer.to_str())


def tiny_tokenizer(folder: Path, vocab: int = 512) -> None:
    """Write tokenizer.json and tokenizer_config.json: byte-level BPE, ids 0..2 special, any text round-trips."""
    if vocab < 300:
        raise ValueError(f"vocab {vocab} is too small, use >= 300: 256 bytes and the special tokens must fit")
    (folder / "tokenizer.json").write_text(_tokenizer_json(vocab), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[2],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
