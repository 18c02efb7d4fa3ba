"""Which attention paths are used. Measured preferences, less what fails `kvd.cache.check` at load: devices differ."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Paths:
    """view: fused attention of one row on a run inside the pool; else the run is multiplied out.
    table: blocks through the block table; else piece by piece.
    fold: rows that share a prefix in one product (their tails need `table`); else each row alone.
    opaque: the architecture takes opaque keys; else decode is one sequence at a time and runs are put together.
    table_from: rows of a single run from which the block table is faster than the fused view; None: never.
    table_batch: rows of a decode batch from which it is faster for all of them; None: never.
    grain: rows that the block table is read in; None: whole blocks.
    chunked_from: rows from which a prefill chunk attends by `attend_chunk`; None: never.
    kernel: decode attends by `kvd.cache.kernel`; none of the other paths of decode is used then.
    ahead: a step may be put in line before the one before it is computed; else updates would copy the pool.
    """

    view: bool = True
    table: bool = True
    fold: bool = True
    opaque: bool = True
    table_from: int | None = None
    table_batch: int | None = None
    grain: int | None = None
    chunked_from: int | None = None
    kernel: bool = False
    ahead: bool = True

    def prefers_chunked(self, count: int, rows: int) -> bool:
        """Whether a chunk of `count` rows that ends at `rows` attends by `attend_chunk`."""
        return self.opaque and count > 1 and self.chunked_from is not None and rows >= self.chunked_from

    def prefers_table(self, rows: int, runs: int, batch: int) -> bool:
        """How a sequence of `rows` rows in `runs` runs attends in a decode batch of `batch`."""
        if not self.table:
            return False
        if runs > 1 or not self.view:
            return True
        long = self.table_from is not None and rows >= self.table_from
        return long or (self.table_batch is not None and batch >= self.table_batch)


CPU_TABLE_FROM = 1024
"""On the CPU backend fused attention multiplies every query head by itself; the block table takes the heads of a group
together, in pieces that fit the cache: 0.4 against 0.66 ms a layer at 2,048 rows, 1.6 against 3.5 at 8,192. Below, both
are microseconds, and the fused one gives mlx-lm's own bits."""
CPU_TABLE_BATCH = 4
"""Per layer, 16 rows of 300: 0.96 ms through the table, 1.37 row by row; 8 of 100: 0.21 against 0.39; 2 of 100: 0.20
against 0.09."""
CPU_CHUNKED_FROM = 512
"""Below, exponentials are a small part of a chunk, and MLX's attention gives mlx-lm's own bits."""
CPU_GRAIN = 128
"""Whole blocks of 256 waste half of what they read of short rows: 16 x 300 rows 1.35 ms against 0.96; longer rows take
the same time either way."""


def preferences(dtype: str, block_size: int, on_cpu: bool, kernel: bool = False) -> Paths:
    """What is fastest on this backend, as far as it works there (`tools/bench attention`). kernel: whether there is one
    for this layout."""
    if not on_cpu or dtype != "float32":
        return Paths(kernel=kernel)
    grain = CPU_GRAIN if block_size % CPU_GRAIN == 0 else None
    return Paths(table_from=CPU_TABLE_FROM, table_batch=CPU_TABLE_BATCH, grain=grain, chunked_from=CPU_CHUNKED_FROM)
