"""How long a pass may take because MLX compiles kernels for it, which it does when they are first needed. Pure."""

from __future__ import annotations

from typing import Final

COMPILE_S: Final = 30.0
"""seconds; products of a batch took as long on an H200"""


class Compiling:
    """Which passes there have been. gpu: whether anything is compiled at all."""

    def __init__(self, gpu: bool) -> None:
        self._gpu = gpu
        self._seen: set[tuple[str, int]] = set()

    def extra_s(self, phase: str, rows: int) -> float:
        """Seconds more than usual for the pass that comes: the first of its size, which goes by powers of two."""
        size = (phase, rows.bit_length())
        if not self._gpu or size in self._seen:
            return 0.0
        self._seen.add(size)
        return COMPILE_S
