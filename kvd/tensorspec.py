"""What a safetensors header says of one tensor. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

BITS: Final = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "U64": 64, "I32": 32, "U32": 32, "I16": 16, "U16": 16,
    "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8,
}  # fmt: skip
"""of an element, by its type's name there"""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, type and shape of a stored tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Raises KeyError for a type that is not in BITS."""
        return self.elements * BITS[self.dtype] // 8
