"""Models get what the machine, its container and its GPU allow."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvd import machine
from kvd.machine import _cgroup_limits, budget, memory, usable


def test_the_lowest_limit_on_the_way_to_the_root_counts(tmp_path: Path) -> None:
    inner = tmp_path / "user" / "app"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (tmp_path / "user" / "memory.max").write_text("123456\n")
    own = tmp_path / "own"
    own.write_text("0::/user/app\n")
    assert min(_cgroup_limits(tmp_path, own)) == 123456


def test_the_budget_is_the_configured_one_or_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory() > 2**20
    monkeypatch.setattr(sys, "platform", "linux")
    assert budget(7, 100) == 7 and budget(None, 100) == 75 and usable(100) == 100


@pytest.mark.parametrize("gib, wired_mb, expected", [
    (8, 0, 16 / 3 - 1), (16, 0, 32 / 3 - 1), (32, 0, 64 / 3 - 1), (36, 0, 26), (128, 0, 95), (16, 14336, 12),
    (64, 8192, 7), (16, 1024, 0.5),
])  # fmt: skip
def test_on_a_mac_it_leaves_the_gpu_some_of_what_that_may_keep(
    monkeypatch: pytest.MonkeyPatch, gib: int, wired_mb: int, expected: float
) -> None:
    """What Macs have reported: 11,453 MB of 16 GiB, 22,906 of 32, 28,991 of 36; sysctl changes it."""
    monkeypatch.setattr(sys, "platform", "darwin")
    asked: list[str] = []
    monkeypatch.setattr(machine, "_sysctl", lambda name: asked.append(name) or wired_mb)
    assert budget(None, gib << 30) == int(expected * 2**30)
    assert set(asked) == {"iogpu.wired_limit_mb"}
    assert budget(7, gib << 30) == 7


@pytest.mark.parametrize("width, told", [(4, 0), (8, 0), (8, -1)])
def test_the_kernels_numbers_are_read_in_either_width(
    monkeypatch: pytest.MonkeyPatch, width: int, told: int
) -> None:
    def sysctlbyname(name: bytes, value: Any, size: Any, new: None, length: int) -> int:
        assert name == b"iogpu.wired_limit_mb" and size._obj.value == 8
        ctypes.memmove(value, (20000).to_bytes(width, "little"), width)
        return told

    monkeypatch.setattr(machine.ctypes, "CDLL", lambda _: SimpleNamespace(sysctlbyname=sysctlbyname))
    assert machine._sysctl("iogpu.wired_limit_mb") == (0 if told else 20000)
