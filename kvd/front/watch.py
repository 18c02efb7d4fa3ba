"""What is looked after at every tick: time limits, workers that hang, unused models, clients that hear nothing."""

from __future__ import annotations

import time

from kvd.front.fleet import Fleet
from kvd.front.sessions import Sessions, late
from kvd.front.slot import Slot

STALL_S = 2.0
"""a tick this late means that the front itself was stopped or asleep: no verdict about workers then"""


class Watch:
    """Owned by the loop's thread; `tick` is called about twice a second with monotonic time."""

    def __init__(self, fleet: Fleet, sessions: Sessions) -> None:
        self._fleet, self._sessions = fleet, sessions
        self._ticked = time.monotonic()

    def tick(self, now: float) -> None:
        asleep, self._ticked = now - self._ticked > STALL_S, now
        for slot in self._fleet.slots:
            self._limits(slot, now)
            self._hang(slot, now, asleep)
            self._unused(slot, now)
        self._sessions.beat(now)

    def _limits(self, slot: Slot, now: float) -> None:
        for session in list(slot.waiting):
            limit = session.limit_s
            if limit is not None and now - session.born >= limit:
                self._fleet.fail_waiting(slot, session, late(limit))

    def _hang(self, slot: Slot, now: float, asleep: bool) -> None:
        worker = slot.worker
        if worker is None:
            return
        if asleep:
            worker.forgive(now)
        elif worker.quiet_for(now) > max(self._fleet.config.daemon.watchdog, self._fleet.patience(slot)):
            worker.kill("hang")

    def _unused(self, slot: Slot, now: float) -> None:
        ttl = slot.ttl_s if slot.ttl_s is not None else self._fleet.config.models.ttl
        if ttl is not None and slot.idle and not slot.pinned and now - slot.idle_since > ttl:
            self._fleet.unload_later(slot, "ttl")
