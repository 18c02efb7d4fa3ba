"""When a model whose worker crashed may be started again. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvd.settings import Daemon


@dataclass(frozen=True, slots=True)
class Policy:
    """Seconds; after `limit` crashes within `window` the model stays down until somebody loads it by hand."""

    delay: float
    most: float
    limit: int
    window: float

    @classmethod
    def of(cls, daemon: Daemon) -> Policy:
        """As configured."""
        return cls(daemon.respawn_delay, daemon.respawn_delay_max, daemon.crash_limit, daemon.crash_window)


class Crashes:
    """The recent crashes of one model."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._at: deque[float] = deque()

    def add(self, now: float) -> None:
        self._at.append(now)
        self._forget(now)

    def clear(self) -> None:
        self._at.clear()

    def count(self, now: float) -> int:
        self._forget(now)
        return len(self._at)

    def down(self, now: float) -> bool:
        return self.count(now) >= self.policy.limit

    def wait(self, now: float) -> float:
        """Seconds from `now` until the next start is allowed: none after the first crash, then doubling."""
        crashes = self.count(now)
        if crashes < 2:
            return 0.0
        delay = min(self.policy.delay * 2.0 ** (crashes - 2), self.policy.most)
        return max(0.0, self._at[-1] + delay - now)

    def _forget(self, now: float) -> None:
        while self._at and now - self._at[0] > self.policy.window:
            self._at.popleft()
