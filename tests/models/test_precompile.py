"""Children that compile, with programs that only pretend to; the real one where there is no GPU computes on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mlx import nn
from structlog.testing import capture_logs

from kvd.leash import ORPHANED
from kvd.models import precompile
from kvd.models.precompile import PROGRAM, ROWS, Precompiling, Quantised, kept_by_mlx, kinds_of

KIND = Quantised("bfloat16", 4, 64, "affine")
WRITES = """
import os, sys
from pathlib import Path
folder, rows = Path(os.environ["MLX_PTX_CACHE_DIR"]), sys.argv[-1]
for suffix in ("ptx", "txt"):
    (folder / f"form{rows}.{suffix}").write_text(" ".join(sys.argv[1:]))
"""


def program(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


def test_every_form_is_there_afterwards_and_is_not_compiled_again(tmp_path: Path) -> None:
    kept = tmp_path / "kept" / "ptx"
    Precompiling([KIND], kept, program(WRITES)).wait()
    assert {file.name for file in kept.glob("form*")} == {f"form{n}.{end}" for n in ROWS for end in ("ptx", "txt")}
    assert (kept / "form32.ptx").read_text() == "bfloat16 4 64 affine 32"
    before = sorted(kept.iterdir())
    Precompiling([KIND], kept, program("raise SystemExit('not needed')")).wait()
    assert sorted(kept.iterdir()) == before


def test_one_that_fails_leaves_nothing_for_mlx_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(precompile.tempfile, "tempdir", None)
    kept = tmp_path / "kept"
    half = program(WRITES + "if rows == '32': sys.exit(3)\n")
    Precompiling([KIND], kept, half).wait()
    assert {file.name for file in kept.iterdir()} == {f"form{n}.{end}" for n in (16, 64) for end in ("ptx", "txt")}
    assert not list(tmp_path.glob("compiling-*"))
    Precompiling([KIND], kept, program(WRITES)).wait()
    assert (kept / "form32.ptx").exists()


def test_one_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "LIMIT_S", 0.2)
    Precompiling([KIND], tmp_path / "kept", program("import time; time.sleep(600)")).wait()
    assert not (tmp_path / "kept").exists()


def test_a_disk_that_takes_nothing_costs_no_model_its_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = tmp_path / "file"
    taken.write_text("no folder")
    Precompiling([KIND], taken / "ptx", program(WRITES)).wait()
    monkeypatch.setattr(precompile.tempfile, "tempdir", str(taken))
    with capture_logs() as logs:
        Precompiling([KIND], tmp_path / "kept", program(WRITES)).wait()
    assert [one["event"] for one in logs] == ["not compiled"] and not (tmp_path / "kept").exists()


def test_a_child_ends_with_who_started_it() -> None:
    with subprocess.Popen([*PROGRAM, "float32", "4", "64", "affine", "16"], stdin=subprocess.PIPE) as child:
        pass  # its standard input is closed
    assert child.returncode in (ORPHANED, 0)


@pytest.mark.parametrize(
    "kind", [("float32", "4", "64", "affine"), ("float16", "8", "32", "affine"), ("bfloat16", "4", "32", "mxfp4")]
)
def test_the_real_program_takes_the_product_of_a_kind(kind: tuple[str, ...]) -> None:
    with subprocess.Popen([*PROGRAM, *kind, "16"], stdin=subprocess.PIPE) as child:
        assert child.wait(60) == 0


def test_kinds_are_those_of_the_quantised_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(
        nn.Linear(64, 64), nn.QuantizedLinear(64, 64, bits=4), nn.QuantizedLinear(64, 64, bits=8),
        nn.QuantizedLinear(64, 128, bits=4), nn.QuantizedLinear(64, 64, group_size=32, bits=4, mode="mxfp4"),
    )  # fmt: skip
    kinds = [(4, 32, "mxfp4"), (4, 64, "affine"), (8, 64, "affine")]
    assert kinds_of(model, "bfloat16") == [Quantised("bfloat16", *kind) for kind in kinds]
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path))
    assert kept_by_mlx() == tmp_path
    monkeypatch.delenv("MLX_PTX_CACHE_DIR")
    assert kept_by_mlx().parts[-3:-2] == ("mlx",) and kept_by_mlx().name == "ptx"
