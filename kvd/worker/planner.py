"""Load a stored prefix, compute it again, or do both from its two ends? Decided by what was measured here. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

REAL_BYTES: Final = 4 * 2**20
"""bytes; a smaller read says nothing of the disk's speed"""
REAL_ROWS: Final = 64
"""rows; a smaller chunk says nothing of the prefill's"""
MEMORY: Final = 64
"""measurements remembered"""
SAVED: Final = 0.1
"""share of the time that computing and reading at once must save: what was measured was each alone"""


@dataclass(slots=True)
class Rates:
    """Measured times. Prefill time per row grows with depth (attention), so it is a line fitted over depth."""

    _chunks: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=MEMORY))
    """(middle depth, seconds per row, rows)"""
    _reads: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MEMORY))

    def prefilled(self, start: int, rows: int, seconds: float) -> None:
        """`rows` rows behind `start` others went through the model in `seconds`."""
        if rows >= REAL_ROWS and seconds > 0:
            self._chunks.append((start + rows / 2, seconds / rows, rows))

    def restored(self, nbytes: int, seconds: float) -> None:
        """A restore of `nbytes` took `seconds` from its first read to its last block's acceptance."""
        if nbytes >= REAL_BYTES and seconds > 0:
            self._reads.append((nbytes, seconds))

    @property
    def row_s(self) -> float | None:
        """Mean seconds per row of late chunks; None before the first."""
        rows = sum(n for _, _, n in self._chunks)
        return sum(s * n for _, s, n in self._chunks) / rows if rows else None

    def prefill_s(self, start: int, end: int) -> float | None:
        """Expected seconds for rows [start, end); None before anything was measured."""
        line = fit((depth, per_row) for depth, per_row, _ in self._chunks)
        if line is None:
            return None
        base, slope = line
        return (end - start) * max(base + slope * (start + end) / 2, 0.0)

    def restore_s(self, nbytes: int) -> float | None:
        total = sum(seconds for _, seconds in self._reads)
        return nbytes * total / sum(size for size, _ in self._reads) if self._reads else None


def fit(points: Iterable[tuple[float, float]]) -> tuple[float, float] | None:
    """Least-squares line (value at 0, slope >= 0); None without points. One depth alone gives a constant."""
    found = list(points)
    if not found:
        return None
    mean_x = sum(x for x, _ in found) / len(found)
    mean_y = sum(y for _, y in found) / len(found)
    spread = sum((x - mean_x) ** 2 for x, _ in found)
    if spread == 0:
        return mean_y, 0.0
    slope = max(sum((x - mean_x) * (y - mean_y) for x, y in found) / spread, 0.0)
    return max(mean_y - slope * mean_x, 0.0), slope


def meet(rates: Rates, start: int, cuts: Sequence[tuple[int, int]], both: bool = True) -> int:
    """Up to which row to compute rows that lie on disk, while those behind are read at the same time.

    start: rows that are there. cuts: (row, bytes of what lies on disk behind it), in order, from (start, all of it) to
    (last row, 0). Returns `start` where reading all of it is fastest, the last row where computing all of it is, and a
    cut between them, if `both` may go on at once, where that saves SAVED of either. `start` if not both were measured.
    """

    def seconds(cut: tuple[int, int]) -> float:
        compute, load = rates.prefill_s(start, cut[0]), rates.restore_s(cut[1])
        return max(compute, load) if compute is not None and load is not None else inf

    simple = min(cuts[0], cuts[-1], key=seconds)
    best = min(cuts, key=seconds) if both else simple
    return best[0] if seconds(best) < (1 - SAVED) * seconds(simple) else simple[0]
