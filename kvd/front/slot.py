"""One model as the front sees it: loaded or not, who waits for it, when it was used, how often it crashed."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvclient.errors import Busy
from kvd.cache.layout import head_sizes
from kvd.cache.precision import parse
from kvd.calibrate.choice import AUTO
from kvd.front.crashes import Crashes
from kvd.front.registry import Model
from kvd.front.sessions import Session, Stage
from kvd.front.workers import Worker


class State(Enum):
    NOT_LOADED = "not loaded"
    LOADING = "loading"
    LOADED = "loaded"
    STOPPING = "stopping"


@dataclass(slots=True, eq=False)
class Slot:
    """Owned by the loop's thread. `waiting` sessions go to the worker when it is ready; `live` ones are there.
    `last_used` is wall-clock time, `idle_since` of the monotonic clock."""

    model: Model
    crashes: Crashes
    kv: str | None = None
    """the precision somebody asked for; None: as configured"""
    state: State = State.NOT_LOADED
    worker: Worker | None = None
    loading: asyncio.Task[None] | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """set while no process of this model runs"""
    waiting: deque[Session] = field(default_factory=deque)
    live: dict[str, Session] = field(default_factory=dict)
    pinned: bool = False
    ttl_s: float | None = None
    last_used: float = 0.0
    idle_since: float = field(default_factory=time.monotonic)
    load_s: float = 0.0
    last_log: str = ""
    """stderr of the newest run"""

    def __post_init__(self) -> None:
        self.gone.set()

    @property
    def sessions(self) -> Iterator[Session]:
        yield from list(self.waiting)
        yield from list(self.live.values())

    @property
    def idle(self) -> bool:
        return self.state is State.LOADED and not self.waiting and not self.live

    @property
    def not_begun(self) -> int:
        """Requests that wait, here or at the worker."""
        return len(self.waiting) + sum(1 for s in self.live.values() if s.stage is Stage.SENT)

    def use(self) -> None:
        self.last_used, self.idle_since = time.time(), time.monotonic()

    def has_precision(self, kv: str) -> bool:
        """Whether loading at `kv` would change nothing: no process, or one at this precision however it is written.
        Raises BadRequest for layers that the loaded model does not have."""
        if self.worker is None or kv == self.worker.spec.kv:
            return True
        layout = self.worker.info.get("kv_layout")
        if layout is None or kv == AUTO:
            return False
        dims = head_sizes(layout)
        return parse(kv, dims) == parse(self.worker.info["kv_precision"], dims)

    def check_precision(self, kv: str | None) -> None:
        """Raises Busy where `kv` is not the precision of a worker that has requests."""
        requests = len(self.waiting) + len(self.live)
        if kv is None or self.has_precision(kv) or self.worker is None or not requests:
            return
        raise Busy(
            f"{self.model.name} has {requests} requests at KV precision {self.worker.spec.kv}, and a model has one "
            f"precision at a time: ask for {kv} again when they are done, or pull the model under a second name",
            model=self.model.name, kv=self.worker.spec.kv, asked=kv, requests=requests,
        )  # fmt: skip

    def describe(self) -> dict[str, Any]:
        """One row of `models` and `status`."""
        row: dict[str, Any] = {}
        if (worker := self.worker) is not None:
            row |= worker.info | worker.beat.stats
            row |= {"kv": worker.spec.kv, "pid": worker.pid, "phase": worker.beat.phase, "log": str(worker.log)}
            row["load_s"] = self.load_s
        now = time.monotonic()
        return row | {
            "name": self.model.name, "state": "down" if self.crashes.down(now) else self.state.value,
            "pinned": self.pinned, "ttl_s": self.ttl_s, "last_used": self.last_used or None,
            "waiting": self.not_begun, "live": len(self.live), "crashes": self.crashes.count(now),
        }  # fmt: skip
