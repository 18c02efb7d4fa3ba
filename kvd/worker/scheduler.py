"""What to do next, decided from values alone: no clock, no MLX, no I/O.

Each request has one number, its *deadline*: arrival + what its priority concedes + the time its remaining rows should
take. The smallest goes first. Short work passes long work and interactive passes background, yet nobody starves: a
later arrival passes only as long as its own deadline is smaller, which ends after a bounded time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

GRID: Final = 64
"""rows; chunks start and end on multiples of it, counted from token 0: products of at least that many rows are
bit-equal however a prompt is cut (design section 2)"""
Seconds = Callable[[int, int], float | None]
"""expected seconds of a chunk of rows [start, end); None: nothing is known yet"""
CONCESSION_S: Final[Mapping[str, float]] = {"interactive": 0.0, "background": 30.0}


class Stage(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    """blocks are on their way from the store"""
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Job:
    """A request as the scheduler sees it. `rows` of `total` prompt rows are stored; `arrival` in seconds.

    `after` names a job whose prefill computes this one's prefix right now: it waits for that instead of repeating it.
    Rows from `border` on are not computed: they are on their way from the store.
    """

    id: str
    stage: Stage
    arrival: float
    total: int
    rows: int = 0
    priority: str = "interactive"
    after: str | None = None
    border: int | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """`chunk`: rows per prefill step. While a stream decodes a step has fewer, where they would take longer than
    `beside_s`, and the stream has its turn every `turn_s` within it. `max_live` bounds the sequences that hold KV.
    `row_s` is the measured time per prefilled row."""

    chunk: int = 512
    beside_s: float = 1.0
    turn_s: float = 0.25
    max_live: int = 32
    row_s: float = 0.005


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows `start` <= row < `end` of a job's prompt go through the model next."""

    id: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Decision:
    """`admit`: start these, in order. `decode`: one token each, in one batch. `prefill`: one chunk after that."""

    admit: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    prefill: Chunk | None = None


def deadline(job: Job, limits: Limits) -> float:
    """Seconds on the clock of `arrival`; smaller goes first."""
    return job.arrival + CONCESSION_S[job.priority] + (job.total - job.rows) * limits.row_s


def unknown(start: int, end: int) -> float | None:
    return None


def decide(jobs: Sequence[Job], limits: Limits, seconds: Seconds = unknown) -> Decision:
    """One step of the loop: every decoding job gets a token, one prefilling job a chunk."""
    live = sum(1 for job in jobs if job.stage is not Stage.WAITING)
    names = {job.id for job in jobs}
    waiting = _ordered((job for job in jobs if job.stage is Stage.WAITING and job.after not in names), limits)
    decoding = tuple(job.id for job in jobs if job.stage is Stage.DECODING)
    prefilling = _ordered((job for job in jobs if job.stage is Stage.PREFILLING), limits)
    chunk = None
    if prefilling:
        first = prefilling[0]
        size = size_beside(first.rows, limits, seconds) if decoding else limits.chunk
        end = chunk_end(first.rows, first.total, size)
        chunk = Chunk(first.id, first.rows, end if first.border is None else min(end, first.border))
    return Decision(tuple(job.id for job in waiting[: max(limits.max_live - live, 0)]), decoding, chunk)


def size_beside(start: int, limits: Limits, seconds: Seconds) -> int:
    """Rows of a chunk from `start` while a stream decodes: halves of `chunk`, whose borders are borders of the smaller
    ones too, down to the grid: below it products would not be bit-equal. Whoever joins waits for its end."""
    size = limits.chunk
    while size > GRID:
        took = seconds(start, start + size)
        if took is not None and took <= limits.beside_s:
            return size
        size = size // 2 // GRID * GRID
    return GRID


def chunk_end(start: int, total: int, size: int) -> int:
    """Where a chunk that starts at `start` ends: on the grid of `size`, counted from token 0, so that a resumed prefill
    is cut as a cold one. The last row is always a step of its own (a full hit runs that same step)."""
    if start >= total - 1:
        return total
    end = (start // size + 1) * size
    if end - start < GRID and start % GRID:
        # A short piece up to the grid would be a product of fewer than 64 rows: take the next piece along.
        end += size
    return min(end, total - 1)


def positions(jobs: Iterable[Job], limits: Limits) -> dict[str, int]:
    """Place in the queue of every waiting job, 0 for the next."""
    order = _ordered((job for job in jobs if job.stage is Stage.WAITING), limits)
    return {job.id: place for place, job in enumerate(order)}


def victim(jobs: Sequence[Job], needing: str, limits: Limits) -> str | None:
    """Whom to preempt when the pool is full and `needing`, which is live, wants rows: the last in the order, be it
    `needing` itself. Who is being read for stays. None: nobody else is live, nothing can be freed."""
    if all(job.id == needing or job.stage is Stage.WAITING for job in jobs):
        return None
    moving = (Stage.PREFILLING, Stage.DECODING)
    can = (job for job in jobs if job.id == needing or (job.stage in moving and job.border is None))
    return _ordered(can, limits)[-1].id


def _ordered(jobs: Iterable[Job], limits: Limits) -> list[Job]:
    return sorted(jobs, key=lambda job: (deadline(job, limits), job.arrival, job.id))
