"""Run as a child (`python -m kvd.doctor.probe`): which backend mlx has, and how fast a product is. Prints JSON."""

from __future__ import annotations

import json
import time
from typing import Any

import mlx.core as mx

ROWS, SIDE = 256, 1024
"""one float32 product of the size a prefill makes on a small model: 0.54 GFLOP"""


def probe() -> dict[str, Any]:
    """{"backend": "cpu" | "metal" | "cuda", "gflops": best of three}"""
    metal = mx.metal.is_available()
    cuda = hasattr(mx, "cuda") and mx.cuda.is_available()
    left, right = mx.ones((ROWS, SIDE)), mx.ones((SIDE, SIDE))
    mx.eval(left, right)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        mx.eval(left @ right)
        seconds.append(time.perf_counter() - began)
    return {
        "backend": "metal" if metal else "cuda" if cuda else "cpu",
        "gflops": 2 * ROWS * SIDE * SIDE / min(seconds) / 1e9,
    }


if __name__ == "__main__":
    print(json.dumps(probe()))
