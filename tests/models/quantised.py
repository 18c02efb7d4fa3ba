"""A model folder quantised in place, as `mlx_lm.convert` would."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model


def quantise(folder: Path, bits: int, group: int = 32) -> Path:
    """float16 scales; embeddings and all matrices quantised. Returns the folder."""
    model, config = load_model(folder)
    model.set_dtype(mx.float16)
    nn.quantize(model, group_size=group, bits=bits)
    weights = dict(tree_flatten(model.parameters()))
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": group, "bits": bits}}))
    return folder
