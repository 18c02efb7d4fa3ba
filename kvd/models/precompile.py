"""MLX's quantised products on CUDA, compiled before they are needed and all at once, in processes of their own.

MLX compiles a product when it first takes a number of rows that it has no form for yet, 28 s each on the host of an
H200: one after the other, and the last in the middle of the first long prompt. What it compiled lies in a folder where
it finds it again. Here each form is compiled in a folder apart and brought there whole: one that is interrupted leaves
nothing that MLX would take.

As a program: `python -P -m kvd.models.precompile TYPE BITS GROUP MODE ROWS`, which ends with its standard input. It
runs twice, the second time on what the first left on the disk.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import structlog

from kvd import leash

ROWS: Final = (16, 32, 64)
"""of the forms that MLX 0.32.4 has; fewer than 8 rows go another way, more than 64 as 64"""
LIMIT_S: Final = 240.0
STDIN: Final = 0
PROGRAM: Final = (sys.executable, "-P", "-m", "kvd.models.precompile")
log = structlog.get_logger()


@dataclass(frozen=True, slots=True, order=True)
class Quantised:
    """A kind of quantised product. dtype: of its activations."""

    dtype: str
    bits: int
    group_size: int
    mode: str


@dataclass(frozen=True, slots=True)
class _Child:
    kind: Quantised
    process: subprocess.Popen[bytes]
    folder: Path


class Precompiling:
    """Forms that are being compiled by children, for MLX to find in `kept`."""

    def __init__(self, kinds: Sequence[Quantised], kept: Path, program: Sequence[str] = PROGRAM) -> None:
        self._kept = kept
        self._children: list[_Child] = []
        self._failed: set[Quantised] = set()
        for kind in kinds:
            if not self._done(kind).exists():
                with self._left_to_mlx(kind):
                    self._children.extend(self._start(kind, rows, program) for rows in ROWS)

    def wait(self) -> None:
        """Until every child has ended. None of what they, or the disk, do not manage costs a model its load."""
        deadline = time.monotonic() + LIMIT_S
        for child in self._children:
            with self._left_to_mlx(child.kind):
                self._finish(child, deadline)
        for kind in {child.kind for child in self._children} - self._failed:
            with self._left_to_mlx(kind):
                self._done(kind).touch()
        if self._children:
            log.info("compiled", forms=len(self._children), kinds_failed=len(self._failed))
        self._children.clear()

    @contextmanager
    def _left_to_mlx(self, kind: Quantised) -> Iterator[None]:
        """What fails is told in the log."""
        try:
            yield
        except OSError as problem:
            log.warning("not compiled", kind=astuple(kind), problem=str(problem))
            self._failed.add(kind)

    def _done(self, kind: Quantised) -> Path:
        """Says that all forms of a kind have been compiled."""
        return self._kept / "-".join(("kvd", version("mlx"), *map(str, astuple(kind)), "done"))

    def _start(self, kind: Quantised, rows: int, program: Sequence[str]) -> _Child:
        folder = Path(tempfile.mkdtemp(prefix="compiling-"))
        process = subprocess.Popen(
            [*program, *map(str, astuple(kind)), str(rows)], env={**os.environ, "MLX_PTX_CACHE_DIR": str(folder)},
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=sys.stderr,
        )  # fmt: skip
        return _Child(kind, process, folder)

    def _finish(self, child: _Child, deadline: float) -> None:
        """Raises OSError: it failed, or what it made cannot be kept."""
        try:
            status = child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            status = child.process.wait()
        assert child.process.stdin is not None
        child.process.stdin.close()
        try:
            if status:
                raise ChildProcessError(f"exit status {status}")
            self._kept.mkdir(mode=0o700, parents=True, exist_ok=True)
            for file in sorted(child.folder.iterdir(), key=lambda file: file.suffix == ".ptx"):  # MLX looks for it
                new = self._kept / f"{child.process.pid}-{file.name}"
                shutil.copyfile(file, new)
                new.replace(self._kept / file.name)
        finally:
            shutil.rmtree(child.folder, ignore_errors=True)


def kinds_of(model: Any, dtype: str) -> list[Quantised]:
    """The kinds of quantised products that a loaded model has. dtype: of its activations."""
    found = set()
    for _, module in model.named_modules():
        if "scales" in module and hasattr(module, "bits"):
            found.add(Quantised(dtype, module.bits, module.group_size, module.mode))
    return sorted(found)


def kept_by_mlx() -> Path:
    """Where MLX keeps what it compiles."""
    named = os.environ.get("MLX_PTX_CACHE_DIR")
    return Path(named) if named else Path(tempfile.gettempdir()) / "mlx" / version("mlx") / "ptx"


def main(arguments: Sequence[str]) -> int:
    import mlx.core as mx

    dtype, bits, group, mode, rows, *again = arguments
    wide = 2 * max(64, int(group))  # MLX has another product for one group
    weights = mx.quantize(mx.zeros((128, wide), getattr(mx, dtype)), int(group), int(bits), mode)
    inputs = mx.zeros((1, int(rows), wide), getattr(mx, dtype))
    mx.eval(mx.quantized_matmul(inputs, *weights, group_size=int(group), bits=int(bits), mode=mode))
    if not again:  # what a full disk cut short is not told: whether it can be read shows when it is
        os.set_inheritable(STDIN, True)
        os.execv(PROGRAM[0], [*PROGRAM, *arguments, "again"])
    return 0


if __name__ == "__main__":
    leash.hold(STDIN)
    sys.exit(main(sys.argv[1:]))
