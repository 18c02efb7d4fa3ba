"""Questions to the front of what the store has. Its store may lie on a disk that hangs: then no answer comes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from kvd.messages import LookedUp, Lookup
from kvd.worker.outbox import Outbox
from kvd.worker.patience import HUNG_S

UNANSWERED: Final = LookedUp(0, (), None, 0)
"""what is handed over instead of an answer that does not come: nothing is known to be stored"""
log = structlog.get_logger()


class Questions:
    """Those that wait for their answer. Engine thread only."""

    def __init__(self, outbox: Outbox, clock: Callable[[], float]) -> None:
        self._outbox = outbox
        self._clock = clock
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[float, Callable[[LookedUp], None]]] = {}
        self._silent = False
        """the last one was not answered in time: until an answer comes none is waited for, and none is of a prompt"""

    def ask(
        self, namespace: bytes, chains: Sequence[bytes], tokens: Sequence[int], handle: Callable[[LookedUp], None]
    ) -> None:
        """`handle` is called once: with the answer, or with UNANSWERED, which may be at once."""
        number = next(self._numbers)
        if self._silent:  # prompts that wait for it would fill the front's memory
            self._outbox.tell(Lookup(number, namespace, (), namespace, ()))
            handle(UNANSWERED)
        else:
            self._outbox.tell(Lookup(number, namespace, tuple(chains), namespace, tuple(tokens)))
            self._open[number] = self._clock(), handle

    def answered(self, answer: LookedUp) -> None:
        if self._silent:
            self._silent = False
            log.info("the store answers again")
        _, handle = self._open.pop(answer.q, (0.0, None))
        if handle is not None:
            handle(answer)

    def due(self) -> float | None:
        """When the oldest is given up; None: none is open."""
        return next((at + HUNG_S for at, _ in self._open.values()), None)

    def expire(self) -> None:
        """Give up those that are due, and with them whatever was asked later."""
        due = self.due()
        if due is None or self._clock() < due:
            return
        given_up, self._open, self._silent = self._open, {}, True
        log.warning("the store does not answer: prompts are computed", seconds=HUNG_S, questions=len(given_up))
        for _, handle in given_up.values():
            handle(UNANSWERED)
