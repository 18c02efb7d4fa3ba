"""What a client that reads too slowly has not been sent yet. Pure: no socket."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from kvclient.wire import Message, message

MERGED = frozenset({"text", "reasoning"})
REPLACED = frozenset({"queued", "progress"})
LIMIT = 4 * 1024 * 1024
"""bytes per client; beyond it the client's requests are cancelled"""


@dataclass(slots=True)
class _Pending:
    kind: str
    id: str
    event: Message | None
    body: dict[str, Any] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)
    size: int = 0

    def merge(self, event: Message, body: dict[str, Any]) -> None:
        self.parts.append(str(body.get("text", "")))
        if "logprobs" in body:
            self.body["logprobs"] = [*self.body.get("logprobs", ()), *body["logprobs"]]
        self.size += len(event.packed)
        self.event = None

    def message(self) -> Message:
        if self.event is not None:
            return self.event
        return message(self.kind, self.id, {**self.body, "text": "".join(self.parts)})


class Outbox:
    """Events of one client in order, but for those of different choices of a request. Text of one choice is merged,
    queue positions and progress are replaced, so the number of entries is bounded by the number of requests and
    choices, and the bytes by their text."""

    def __init__(self) -> None:
        self._queue: deque[_Pending] = deque()
        self._last: dict[str, dict[object, _Pending]] = {}
        """by request and choice: what more may be merged into"""
        self.size = 0
        """bytes"""

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, event: Message) -> None:
        body = event.body if event.kind in MERGED else {}
        size = len(event.packed)
        lasts = self._last.setdefault(event.id, {})
        last = lasts.get(body.get("index"))
        if last is not None and event.kind in MERGED and _fits(last, event.kind, body):
            last.merge(event, body)
        elif last is not None and event.kind in REPLACED and last.kind in REPLACED:
            size -= last.size
            last.kind, last.event, last.size = event.kind, event, len(event.packed)
        else:
            if event.kind not in MERGED | REPLACED:
                lasts.clear()  # text behind it stays behind it
            pending = _Pending(event.kind, event.id, event, body, [str(body.get("text", ""))], size)
            self._queue.append(pending)
            lasts[body.get("index")] = pending
        self.size += size

    def peek(self) -> Message:
        return self._queue[0].message()

    def pop(self) -> None:
        sent = self._queue.popleft()
        self.size -= sent.size
        lasts, index = self._last.get(sent.id, {}), sent.body.get("index")
        if lasts.get(index) is sent:
            del lasts[index]
        if not lasts:
            self._last.pop(sent.id, None)

    def clear(self) -> None:
        self._queue.clear()
        self._last.clear()
        self.size = 0


def _fits(last: _Pending, kind: str, body: dict[str, Any]) -> bool:
    """Both with or both without log probabilities."""
    return last.kind == kind and ("logprobs" in last.body) == ("logprobs" in body)
