"""What the worker has to tell the front and has not been able to send yet. Thread-safe, no socket."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvclient.wire import TERMINAL, Message, pack
from kvd.messages import Event, ToFront

MERGED = frozenset({"text", "reasoning"})
REPLACED = frozenset({"queued", "progress"})


@dataclass(slots=True)
class _Unsent:
    kind: str
    id: str
    body: dict[str, Any]


class Outbox:
    """Messages in order, but for events of different choices of a request. While the link is behind, text of one choice
    is merged and progress replaced, so what waits is bounded by the number of choices and their text. Bodies are packed
    by the sender's thread, not the engine's."""

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        """`wake` is called, on the putting thread, when there is something to send."""
        self._lock = threading.Lock()
        self._queue: deque[_Unsent | ToFront] = deque()
        self._last: dict[tuple[str, object], _Unsent] = {}
        """by request and choice: its last event"""
        self._told: dict[str, float] = {}
        self.wake = wake

    def tell(self, message: ToFront) -> None:
        """A message between worker and front."""
        with self._lock:
            self._queue.append(message)
        self.wake()

    def event(self, kind: str, id: str, body: dict[str, Any]) -> None:
        """An event for the client of request `id`; the body belongs to the outbox from now on."""
        with self._lock:
            if kind in TERMINAL:
                self._told.pop(id, None)
            else:
                self._told[id] = time.monotonic()
            key = id, body.get("index")
            last = self._last.get(key)
            if last is not None and kind in MERGED and _fits(last, kind, body):
                last.body["text"] += body["text"]
                if "logprobs" in body:
                    last.body["logprobs"] = [*last.body["logprobs"], *body["logprobs"]]
                return
            if last is not None and kind in REPLACED and last.kind in REPLACED:
                last.kind, last.body = kind, body
                return
            unsent = _Unsent(kind, id, body)
            self._last[key] = unsent
            self._queue.append(unsent)
        self.wake()

    def take(self) -> Message | None:
        """The next message, ready to send; None when there is none."""
        with self._lock:
            if not self._queue:
                return None
            first = self._queue.popleft()
            if isinstance(first, _Unsent):
                key = first.id, first.body.get("index")
                if self._last.get(key) is first:
                    del self._last[key]
        if isinstance(first, _Unsent):
            return Event(first.kind, first.id, pack(first.body)).encode()
        return first.encode()

    def repeat(self, kind: str, id: str, body: dict[str, Any], before: float) -> None:
        """The same event again if request `id` was last told something before `before` (monotonic seconds) and has not
        ended meanwhile: nothing may follow a terminal event."""
        with self._lock:
            key = id, None
            if self._told.get(id, before) >= before or key in self._last:
                return
            self._told[id] = time.monotonic()
            self._last[key] = _Unsent(kind, id, body)
            self._queue.append(self._last[key])
        self.wake()

    def __len__(self) -> int:
        return len(self._queue)


def _fits(last: _Unsent, kind: str, body: dict[str, Any]) -> bool:
    return last.kind == kind and ("logprobs" in last.body) == ("logprobs" in body)
