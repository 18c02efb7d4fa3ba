from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvclient.errors import Internal
from kvd.models import blas
from kvd.models.backend import expected

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or expected() != "cpu", reason="only Linux's CPU backend needs a BLAS put in front"
)
MEASURE = (
    "import sys; from pathlib import Path; from kvd.models import blas\n"
    "found = blas.measure(Path(sys.argv[1]) if sys.argv[1:] else None)\n"
    "print(found.fast, found.gflops, found.reason)"
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def library(home: Path) -> Path:
    found = blas.prepare(home)
    assert found is not None
    return found


def measured(preloaded: Path | None, *arguments: Path) -> list[str]:
    """Verdict and figures in a child without a system's OpenBLAS on its search path."""
    env = {name: value for name, value in os.environ.items() if name not in ("LD_LIBRARY_PATH", "LD_PRELOAD")}
    env |= {"OPENBLAS_NUM_THREADS": "1"} | ({"LD_PRELOAD": str(preloaded)} if preloaded else {})
    words = [sys.executable, "-c", MEASURE, *map(str, arguments)]
    return subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout.split()


def test_the_library_is_made_once_under_the_home(home: Path, library: Path) -> None:
    assert library.parent == home / "lib"
    before = library.stat()
    assert blas.prepare(home) == library
    assert library.stat().st_mtime_ns == before.st_mtime_ns
    assert sorted(path.name for path in library.parent.iterdir()) == sorted(
        [".lock", library.name, library.with_suffix(".sha256").name]
    )


def test_in_front_of_mlx_it_makes_products_fast_and_without_it_the_times_tell(library: Path) -> None:
    assert measured(library, library)[0] == "True"
    assert measured(None, library)[0] == "False"


def test_the_verdict_does_not_trust_the_variable(library: Path, tmp_path: Path) -> None:
    """LD_PRELOAD names a file that the loader skips."""
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    assert measured(broken, library)[0] == "False"


def test_ten_processes_at_once_make_one_sound_library(tmp_path: Path) -> None:
    script = "import sys; from pathlib import Path; from kvd.models import blas; print(blas.prepare(Path(sys.argv[1])))"
    words = [sys.executable, "-c", script, str(tmp_path)]
    running = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(10)]
    told = {process.communicate(timeout=120)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0] * 10
    assert len(told) == 1
    assert len(list((tmp_path / "lib").glob("*.so"))) == 1
    assert not list((tmp_path / "lib").glob(".blas-*"))


@pytest.mark.parametrize("content", [b"", b"\0" * 4096])
def test_a_damaged_library_is_made_anew(tmp_path: Path, library: Path, content: bytes) -> None:
    shutil.copytree(library.parent, tmp_path / "lib")
    damaged = tmp_path / "lib" / library.name
    damaged.write_bytes(content)
    assert blas.prepare(tmp_path) == damaged
    assert damaged.read_bytes() == library.read_bytes()


def test_another_version_replaces_the_library(tmp_path: Path, library: Path) -> None:
    source = blas.find_source()
    first = blas.prepare(tmp_path, source)
    second = blas.prepare(tmp_path, replace(source, version="99.0"))
    assert first != second
    assert list((tmp_path / "lib").glob("*.so")) == [second]


def test_why_it_cannot_be_had_is_said_and_work_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = blas.find_source()
    with pytest.raises(Internal, match="could not be prepared"):
        blas.prepare(tmp_path / "a", replace(source, patchelf=Path(shutil.which("false") or "/bin/false")))
    with pytest.raises(Internal, match="could not be prepared.*cblas_sgemm"):
        blas.prepare(tmp_path / "a", replace(source, patchelf=Path(shutil.which("true") or "/bin/true")))
    assert not list((tmp_path / "a" / "lib").glob("*.so"))
    with pytest.raises(Internal, match="space or colon"):
        blas.prepare(tmp_path / "with space")
    monkeypatch.setattr(blas, "distribution", lambda name: (_ for _ in ()).throw(blas.PackageNotFoundError(name)))
    with pytest.raises(Internal, match="package scipy-openblas32 is not installed"):
        blas.prepare(tmp_path / "b")
    assert blas.preload(tmp_path / "b") is None
