"""Which MLX backend this machine runs: the one place that decides. mlx itself is imported by `actual` only."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Literal

Backend = Literal["cpu", "metal", "cuda"]


def expected() -> Backend:
    """The backend that a worker will have, told without mlx: for estimates made beforehand."""
    if sys.platform == "darwin":
        return "metal"
    return "cuda" if Path("/dev/nvidiactl").exists() and _installed("mlx-cuda-12", "mlx-cuda-13") else "cpu"


def _installed(*names: str) -> bool:
    for name in names:
        try:
            distribution(name)
        except PackageNotFoundError:
            continue
        return True
    return False


def actual() -> Backend:
    """The backend of this process's mlx: that of its default device."""
    import mlx.core as mx

    if mx.default_device() == mx.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"
