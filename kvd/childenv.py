"""What a worker or a calibration finds when it starts: its environment, and kernels compiled before."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kvd.home import Home


def environment(base: Mapping[str, str], home: Home, tmp: Path, preload: Path | None) -> dict[str, str]:
    """Of `base`, with a private TMPDIR and a BLAS that leaves one core to others; `preload` goes in front of its
    libraries."""
    made = {**base, "KVD_HOME": str(home.root), "TMPDIR": str(tmp)}
    made.setdefault("OPENBLAS_NUM_THREADS", str(max(1, (os.cpu_count() or 1) - 1)))
    if preload is not None:
        made["LD_PRELOAD"] = ":".join(filter(None, (str(preload), base.get("LD_PRELOAD"))))
    return made


def keep_kernels(tmp: Path, kernels: Path) -> None:
    """MLX compiles kernels into `$TMPDIR/mlx`: what one process compiled, the next finds (minutes on a GPU)."""
    kernels.mkdir(mode=0o700, exist_ok=True)
    link = tmp / "mlx"
    if not link.is_symlink():
        link.symlink_to(kernels)
