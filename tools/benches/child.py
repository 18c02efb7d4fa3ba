"""A child process that owns MLX and answers one JSON line per JSON line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from kvd.models import blas

TOOLS = Path(__file__).resolve().parents[1]


class Child:
    """`benches.children.<name>` with `arguments`, the BLAS of the workers in front of MLX and one thread."""

    def __init__(self, name: str, *arguments: str, home: Path) -> None:
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(TOOLS), os.environ.get("PYTHONPATH")))),
            "OPENBLAS_NUM_THREADS": os.environ.get("OPENBLAS_NUM_THREADS", "1"),
        }
        if library := blas.preload(home):
            env["LD_PRELOAD"] = str(library)
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"benches.children.{name}", *arguments],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the measuring child ended with {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)
