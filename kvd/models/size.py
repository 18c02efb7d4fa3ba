"""How much memory a model's weights take, known from headers before anything is allocated.

Standard library only: `kvd pull`, `kvd doctor` and the front ask before a worker exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvd.models.fingerprint import read_config, weight_files
from kvd.models.tensors import read_specs
from kvd.tensorspec import BITS, TensorSpec


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes. `stored`: as in the files. `dense`: every weight as float32. `kept`: as stored, but with the scales of
    quantised matrices and all vectors as float32, which the CPU backend needs."""

    stored: int
    dense: int
    kept: int


def sizes(folder: Path) -> Sizes:
    """Sizes of the model in `folder`. Raises BadRequest or UnsupportedModel as reading its headers does."""
    config = read_config(folder)
    specs = {spec.name: spec for file in weight_files(folder) for spec in read_specs(file)}
    stored = sum(spec.nbytes for spec in specs.values())
    elements = sum(_dense_elements(spec, specs, config) for spec in specs.values())
    widened = sum(4 * spec.elements - spec.nbytes for spec in specs.values() if _widened(spec, specs))
    return Sizes(stored, 4 * elements, stored + widened)


def _widened(spec: TensorSpec, specs: dict[str, TensorSpec]) -> bool:
    base, _, kind = spec.name.rpartition(".")
    half = spec.dtype in ("F16", "BF16")
    return half and (len(spec.shape) == 1 or (kind in ("scales", "biases") and f"{base}.weight" in specs))


def _dense_elements(spec: TensorSpec, specs: dict[str, TensorSpec], config: dict[str, Any]) -> int:
    """Elements that this tensor becomes when every quantised matrix is expanded (scales and biases vanish)."""
    base, _, kind = spec.name.rpartition(".")
    if kind in ("scales", "biases", "qzeros", "g_idx") and (f"{base}.weight" in specs or f"{base}.qweight" in specs):
        return 0
    if kind == "qweight":
        return spec.elements * 8  # awq and gptq: eight 4-bit values a word
    scales = specs.get(f"{base}.scales")
    if kind != "weight" or scales is None or spec.dtype not in ("U32", "U8", "I32"):
        return spec.elements
    quantization = config.get("quantization") or config.get("quantization_config") or {}
    if isinstance(entry := quantization.get(base), dict):
        quantization = entry
    bits = quantization.get("bits")
    if isinstance(bits, int) and bits > 0:
        return spec.elements * BITS[spec.dtype] // bits
    return scales.elements * int(quantization.get("group_size") or 32)
