"""Which attention paths are used. Decided at load by `kvd.cache.check`: devices differ in what they get right."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Paths:
    """view: fused attention of one row on a run inside the pool; else the run is multiplied out.
    table: blocks through the block table; else piece by piece.
    fold: rows that share a prefix in one product (their tails need `table`); else each row alone.
    opaque: the architecture takes opaque keys; else decode is one sequence at a time and runs are put together.
    table_from: rows of a single run from which the block table is faster than the fused view; None: never.
    """

    view: bool = True
    table: bool = True
    fold: bool = True
    opaque: bool = True
    table_from: int | None = None

    def prefers_table(self, rows: int, runs: int) -> bool:
        """How one row with `rows` rows of KV in `runs` runs attends: a choice that does not depend on its batch, so
        that a sequence gives the same bits alone and in company."""
        if not self.table:
            return False
        return runs > 1 or not self.view or (self.table_from is not None and rows >= self.table_from)


CPU_TABLE_FROM = 1024
"""On the CPU backend fused attention multiplies every query head by itself; the block table takes the heads of a group
together and blocks that fit the cache: 0.4 against 0.66 ms a layer at 2,048 rows, 1.6 against 3.5 at 8,192
(`tools/bench attention`). Below, both are microseconds, and the fused one gives mlx-lm's own bits."""
