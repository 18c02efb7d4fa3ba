"""One ledger of memory over all models: weights and KV pools against a budget. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvclient.errors import OutOfMemory
from kvd.units import format_size


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
