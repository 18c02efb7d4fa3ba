"""Signs of life from a thread without MLX: the front's watchdog and every waiting client see that work goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvclient.wire import BEAT_S
from kvd.messages import Beat
from kvd.worker.outbox import Outbox


@dataclass(frozen=True, slots=True)
class Pulse:
    """What the engine does. Replaced as a whole by the engine, read by the beat.

    at: when the work in hand began (monotonic seconds). expected_s: how long it should take. live: per request the
    event that tells its client where it stands."""

    phase: str = "loading"
    at: float = field(default_factory=time.monotonic)
    expected_s: float = 0.0
    stats: Mapping[str, Any] = field(default_factory=dict)
    live: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)


class Heart:
    """Sends a Beat every second, and to every live request that heard nothing for that long its last standing again."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._stopping = threading.Event()
        self._last = 0.0
        self.pulse = Pulse()
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(BEAT_S / 2):
            self.beat(time.monotonic())

    def beat(self, now: float) -> None:
        """One turn at monotonic time `now`."""
        pulse = self.pulse
        if now - self._last >= BEAT_S * 0.9:
            self._last = now
            self._outbox.tell(Beat(pulse.phase, now - pulse.at, pulse.expected_s, dict(pulse.stats)))
        for id, (kind, body) in pulse.live.items():
            self._outbox.repeat(kind, id, dict(body), now - BEAT_S * 0.75)
