"""How much memory this machine has, and how much of it is for models."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

SHARE = 0.75
"""of what the machine, or the cgroup, has"""
CGROUP = Path("/sys/fs/cgroup")
GIB = 1 << 30
SCRATCH = GIB
"""bytes on a Mac's GPU that are on no ledger: what MLX computes with, and keeps of it for its next use"""


def memory() -> int:
    """Bytes of memory this process may hope for: the machine's, or its cgroup's limit where that is lower."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *_cgroup_limits(CGROUP)])


def usable(total: int) -> int:
    """Of `total` bytes those that models can have. Commands of a Mac's GPU fail where they need more than macOS lets it
    keep: `iogpu.wired_limit_mb` where somebody has set that; else two thirds of the memory, and three quarters from
    36 GiB on (some versions allow a little more)."""
    if sys.platform != "darwin":
        return total
    if wired := _sysctl("iogpu.wired_limit_mb"):
        return wired << 20
    return total * 3 // 4 if total >= 36 * GIB else total * 2 // 3


def budget(limit: int | None, total: int) -> int:
    """Bytes for weights and pools together; `limit` is the configured one."""
    if limit is not None:
        return limit
    most = usable(total)
    return int(total * SHARE) if most == total else min(int(total * SHARE), max(most - SCRATCH, most // 2))


def _sysctl(name: str) -> int:
    """A number that macOS's kernel tells, of 32 or 64 bits; 0 where it knows none of that name."""
    value, size = ctypes.c_uint64(0), ctypes.c_size_t(8)
    failed = ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return 0 if failed else value.value


def _cgroup_limits(root: Path, own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Limits of our cgroup and its parents (v2), and of v1's memory controller."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    inner = next((line[3:] for line in lines if line.startswith("0::")), "/").strip("/")
    folder = root / inner
    places = [p / "memory.max" for p in (folder, *folder.parents) if p.is_relative_to(root)]
    return [n for place in (*places, root / "memory" / "memory.limit_in_bytes") if (n := _number(place)) is not None]


def _number(place: Path) -> int | None:
    try:
        text = place.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
