"""Which attention paths may be used. Decided at load by `kvd.cache.check`: devices differ in what they get right."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Paths:
    """view: fused attention of one row on a run inside the pool; else the run is multiplied out.
    fold: rows that share a prefix in one product; else each row alone.
    table: blocks through the block table; else piece by piece.
    opaque: the architecture takes opaque keys; else decode is one sequence at a time and runs are put together.
    """

    view: bool = True
    fold: bool = True
    table: bool = True
    opaque: bool = True
