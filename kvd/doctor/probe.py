"""Run as a child (`python -m kvd.doctor.probe [OPENBLAS]`): which backend mlx has, and how fast a product is.

Prints JSON. The library is what LD_PRELOAD put in front: products are compared with its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvd.cache.devicemem import lacking
from kvd.models import blas


def probe(library: Path | None) -> dict[str, Any]:
    """{"backend": "cpu" | "metal" | "cuda", "fast": bool, "seen": text, "lacking": text}; `fast` speaks of products on
    the CPU, `lacking` of what makes a GPU slow."""
    metal = mx.metal.is_available()
    cuda = hasattr(mx, "cuda") and mx.cuda.is_available()
    measured = blas.measure(library)
    backend = "metal" if metal else "cuda" if cuda else "cpu"
    return {"backend": backend, "fast": measured.fast, "seen": measured.reason, "lacking": lacking()}


if __name__ == "__main__":
    print(json.dumps(probe(Path(sys.argv[1]) if len(sys.argv) > 1 else None)))
