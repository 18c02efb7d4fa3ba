"""What turns the daemon's events into one API's reply: one object per request, no I/O."""

from __future__ import annotations

import json
from typing import Any, Protocol

from kvclient.errors import KvdError
from kvclient.events import Completion, Event, Stats
from kvclient.gateway.ask import Ask


class Shape(Protocol):
    """Bytes of a server-sent-event stream, or one object. `begin` comes first; `end` or `fail` last."""

    complete: bool
    """all that the stream holds has been given out: nothing waits for the end of the request any more"""

    def begin(self, event: Event) -> bytes:
        """Opens the stream; `event` is the first one that arrived."""

    def event(self, event: Event) -> bytes:
        """`text`, `reasoning`, `tool_call` or `finish`; empty if the API shows nothing for it."""

    def keep_alive(self, event: Event) -> bytes:
        """`queued` or `progress`: something that clients skip and proxies see."""

    def end(self, done: Completion) -> bytes: ...

    def fail(self, problem: KvdError) -> bytes:
        """An error after the stream has begun."""

    def whole(self, done: Completion) -> dict[str, Any]:
        """The reply of a request that does not stream."""


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def comment(event: Event) -> bytes:
    """A server-sent comment that tells a reader what is waited for."""
    if event.progress is not None:
        at = event.progress
        return f": prefill {at.done}/{at.total} cached {at.cached}\n\n".encode()
    return f": queued {event.position or 0}\n\n".encode()


def about(stats: Stats, ask: Ask) -> dict[str, Any]:
    """The reply's `kvd` object: the daemon's stats, and what the gateway did to the request."""
    return {"stats": stats.to_wire(), **ask.notes}
