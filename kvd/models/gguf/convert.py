"""A GGUF file into an MLX model folder, one tensor in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from kvd.models.gguf import types
from kvd.models.gguf.blocks import PACKED_BITS, dequantise, pack
from kvd.models.gguf.family import ROPE_FREQS, mlx_name, model_config, row_order
from kvd.models.gguf.reader import GGUF, TensorInfo, read_gguf, refuse
from kvd.models.gguf.tokenizer import token_ids, write_tokenizer
from kvd.models.tensors import Part, write_tensors
from kvd.tensorspec import TensorSpec

GROUP = 32
ELEMENTS_AT_ONCE = 1 << 18
_PLAIN = {types.F32: "F32", types.F16: "F16", types.BF16: "BF16"}


def convert(source: Path, folder: Path, on_bytes: Callable[[int], object] = lambda count: None) -> dict[str, Any]:
    """Write config.json, model.safetensors and the tokenizer of `source` into the existing `folder`.

    Q4_0, Q4_1 and Q8_0 stay as they are (MLX groups of 32, float16 scales), F32/F16/BF16 too; other types are
    dequantised to float16. `on_bytes` hears of the bytes of `source` as they are done. Returns the config.
    Raises BadRequest or UnsupportedModel; `folder` may then hold a part of the result.
    """
    gguf = read_gguf(source)
    with gguf.open() as file:
        config = model_config(gguf, lambda info: _dense(gguf, file, info))
        tensors = [info for info in gguf.tensors.values() if info.name != ROPE_FREQS]
        _check_shapes(gguf, config)
        config |= token_ids(gguf)
        if quantization := _quantization(tensors):
            config["quantization"] = quantization
        write_tokenizer(gguf, folder)
        parts = [_part(gguf, file, config, info, on_bytes) for info in tensors]
        write_tensors(folder / "model.safetensors", parts)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return config


def _quantization(tensors: Sequence[TensorInfo]) -> dict[str, Any]:
    """mlx-lm's per-path map: the most frequent width on top, the others by name."""
    bits = {
        str(mlx_name(info.name)).removesuffix(".weight"): PACKED_BITS[info.type]
        for info in tensors
        if info.type in PACKED_BITS
    }
    if not bits:
        return {}
    widths = list(bits.values())
    usual = max(set(widths), key=widths.count)
    others = {path: {"group_size": GROUP, "bits": width} for path, width in bits.items() if width != usual}
    return {"group_size": GROUP, "bits": usual, **others}


def _check_shapes(gguf: GGUF, config: dict[str, Any]) -> None:
    """The matrices that the rest relies on have the shapes that the metadata promises."""
    hidden, size = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    inner = config["intermediate_size"]
    expected = {
        "attn_norm": (hidden,), "ffn_norm": (hidden,), "attn_q": (q, hidden), "attn_k": (kv, hidden),
        "attn_v": (kv, hidden), "attn_output": (hidden, q), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }  # fmt: skip
    if config["model_type"] == "qwen3":
        expected |= {"attn_q_norm": (size,), "attn_k_norm": (size,)}
    if config["num_hidden_layers"] * len(expected) > len(gguf.tensors):
        raise refuse(gguf.path, f"incomplete: {len(gguf.tensors)} tensors for {config['num_hidden_layers']} layers")
    wanted = {f"blk.{i}.{k}.weight": v for i in range(config["num_hidden_layers"]) for k, v in expected.items()}
    if config["attention_bias"] or config["model_type"] == "qwen2":
        biased = {"attn_q": (q,), "attn_k": (kv,), "attn_v": (kv,)}
        biased |= {"attn_output": (hidden,)} if config["model_type"] == "llama" else {}
        wanted |= {f"blk.{i}.{k}.bias": v for i in range(config["num_hidden_layers"]) for k, v in biased.items()}
    matrix = (config["vocab_size"], hidden)
    wanted |= {"token_embd.weight": matrix, "output_norm.weight": (hidden,)}
    wanted |= {} if config["tie_word_embeddings"] else {"output.weight": matrix}
    if unknown := gguf.tensors.keys() - wanted.keys() - {ROPE_FREQS}:
        raise refuse(gguf.path, f"tensor {min(unknown)} has no place in a {config['model_type']} model")
    for name, shape in wanted.items():
        info = gguf.tensors.get(name)
        if info is None:
            raise refuse(gguf.path, f"incomplete: tensor {name} is missing", tensor=name)
        if info.shape != shape:
            raise refuse(gguf.path, f"tensor {name} has shape {info.shape}, the metadata says {shape}", tensor=name)


def _part(
    gguf: GGUF, file: BinaryIO, config: dict[str, Any], info: TensorInfo, on_bytes: Callable[[int], object]
) -> Part:
    name = str(mlx_name(info.name))
    order = row_order(config, info.name)
    if bits := PACKED_BITS.get(info.type):
        base, rows, columns = name.removesuffix(".weight"), info.shape[:-1], info.shape[-1]
        specs: tuple[TensorSpec, ...] = (
            TensorSpec(name, "U32", (*rows, columns * bits // 32)),
            TensorSpec(base + ".scales", "F16", (*rows, columns // GROUP)),
            TensorSpec(base + ".biases", "F16", (*rows, columns // GROUP)),
        )
    else:
        specs = (TensorSpec(name, _PLAIN.get(info.type, "F16"), info.shape),)

    def make() -> Sequence[Any]:
        arrays = _arrays(gguf, info, _rows(gguf, file, info, order), specs)
        on_bytes(info.nbytes)
        return arrays

    return Part(specs, make)


def _rows(gguf: GGUF, file: BinaryIO, info: TensorInfo, order: NDArray[np.intp] | None) -> NDArray[np.uint8]:
    """Raw blocks as [rows, bytes], in MLX's row order. A vector is one row, unless it is permuted, by element."""
    width = info.row_bytes if len(info.shape) > 1 or order is None else info.type.size
    raw = np.frombuffer(gguf.read(file, info), np.uint8).reshape(-1, width)
    return raw if order is None else raw[order]


def _arrays(
    gguf: GGUF, info: TensorInfo, raw: NDArray[np.uint8], specs: Sequence[TensorSpec]
) -> Sequence[NDArray[Any]]:
    """The tensors of `specs`, some rows at a time: what is in between takes several times a row's final size."""
    if info.type in _PLAIN:
        return (np.ascontiguousarray(raw),)
    kinds = {"U32": np.uint32, "F16": np.float16}
    arrays: list[NDArray[Any]] = [np.empty((len(raw), spec.shape[-1]), kinds[spec.dtype]) for spec in specs]
    step = max(1, ELEMENTS_AT_ONCE // info.shape[-1])
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(raw), step):
            rows = raw[start : start + step]
            done = pack(rows, info.type) if info.type in PACKED_BITS else (dequantise(rows, info.type),)
            for array, piece in zip(arrays, done, strict=True):
                array[start : start + step] = piece
    for array in arrays:
        if array.dtype == np.float16 and not np.isfinite(array).all():
            raise refuse(gguf.path, f"tensor {info.name} holds values that are not finite in float16", tensor=info.name)
    return arrays


def _dense(gguf: GGUF, file: BinaryIO, info: TensorInfo) -> NDArray[np.float32]:
    if info.type is not types.F32 or info.nbytes > 1 << 16:
        raise refuse(gguf.path, f"tensor {info.name} is not a short float32 vector")
    return np.frombuffer(gguf.read(file, info), np.float32)
