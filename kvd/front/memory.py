"""One ledger of memory over all models: weights and KV pools against a budget. Pure, but for reading the limits."""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from kvclient.errors import OutOfMemory
from kvd.units import format_size

SHARE = 0.75
"""of what the machine, or the cgroup, has"""
CGROUP = Path("/sys/fs/cgroup")
GIB = 1 << 30
SCRATCH = GIB
"""bytes on a Mac's GPU that are on no ledger: what MLX computes with, and keeps of it for its next use"""


def machine(root: Path = CGROUP) -> int:
    """Bytes of memory this process may hope for: the machine's, or its cgroup's limit where that is lower."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *_cgroup_limits(root)])


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


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes on the ledger for one model."""

    weights: int
    pool: int

    @property
    def total(self) -> int:
        return self.weights + self.pool


class Ledger:
    """Who holds how much. Nothing is given beyond the budget; what a model turns out to use is written down."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._held: dict[str, Held] = {}

    @property
    def used(self) -> int:
        return sum(held.total for held in self._held.values())

    @property
    def free(self) -> int:
        return max(0, self.budget - self.used)

    def held(self, name: str) -> Held:
        return self._held.get(name, Held(0, 0))

    def reserve(self, name: str, weights: int, pool: int) -> None:
        """Before a load. Raises OutOfMemory with both numbers, and then nothing is reserved. `needed` over `budget`
        says that it would not fit alone either."""
        available = self.free + self.held(name).total
        needed = weights + pool
        if needed > available:
            budget = f"the budget of {format_size(self.budget)} (memory.limit, flag --memory-limit)"
            reason = f"more than {budget}"
            if needed <= self.budget:
                reason = f"{format_size(available)} of {budget} are free, models in use or pinned do not give way"
            raise OutOfMemory(
                f"{name} needs {format_size(needed)} ({format_size(weights)} for its weights, {format_size(pool)} for "
                f"the smallest KV pool), {reason}",
                needed=needed, available=available, budget=self.budget, used=self.used - self.held(name).total,
                what="weights and pool",
            )  # fmt: skip
        self._held[name] = Held(weights, pool)

    def grow(self, name: str, nbytes: int) -> bool:
        """The pool wants `nbytes` more (negative: gives back)."""
        if nbytes > self.free:
            return False
        held = self.held(name)
        self._held[name] = Held(held.weights, max(0, held.pool + nbytes))
        return True

    def correct(self, name: str, weights: int | None, pool: int | None) -> None:
        """What the worker reports, where it is more than was reserved (or, for weights, known exactly now)."""
        held = self.held(name)
        self._held[name] = Held(
            held.weights if weights is None else weights, held.pool if pool is None else max(held.pool, pool)
        )

    def release(self, name: str) -> None:
        self._held.pop(name, None)
