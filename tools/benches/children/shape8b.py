"""Writes a model of Llama-3-8B's shape with random weights, 4-bit in groups of 64."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn as stock
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs

from kvd.models.record import Record, write_record
from tests.tiny import tiny_tokenizer

nn: Any = stock  # its stubs name no functions
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 2,
}
QUANTIZATION = {"group_size": 64, "bits": 4}


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    model = Model(ModelArgs.from_dict(CONFIG))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, **QUANTIZATION)
    mx.eval(model.parameters())
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization": QUANTIZATION}))
    tiny_tokenizer(folder)
    write_record(folder, Record(folder.name, "random weights of Llama-3-8B's shape", time.time()))


if __name__ == "__main__":
    main()
