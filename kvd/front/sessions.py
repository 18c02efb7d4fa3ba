"""Live requests: who asked, what for, what the client heard last."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvclient import wire
from kvclient.errors import BadRequest, Cancelled, KvdError, Timeout
from kvclient.fields import VERBS
from kvclient.wire import Message
from kvd.front.logs import Log, logger
from kvd.front.metrics import Count, Metrics
from kvd.front.server import Peer, Server, error
from kvd.messages import WORK_KINDS, Event

KNOWN = frozenset({*VERBS, "cache"})
LOGGED = (
    "prompt_tokens", "computed_tokens", "completion_tokens", "ttft_s", "kv_precision", "kv_bytes", "peak_memory_bytes",
)  # fmt: skip
"""of a request's stats, what its line in the log says"""


class Stage(Enum):
    WAITING = "waiting"
    """in the front: for its model to load, or for an answer to an RPC"""
    SENT = "sent"
    """at the worker, which has not begun with it"""
    RUNNING = "running"


@dataclass(slots=True, eq=False)
class Session:
    """One request from arrival to its terminal event. `born` and `heard` are of the monotonic clock."""

    id: str
    peer: Peer
    kind: str
    packed: bytes
    born: float
    log: Log
    model: str = ""
    stage: Stage = Stage.WAITING
    heard: float = 0.0
    limit_s: float | None = None
    """the request's own time limit, where the front must watch it"""
    load_s: float = 0.0
    sent_again: bool = False
    """its first worker was lost before it began"""
    repeat: tuple[str, dict[str, Any]] = ("queued", {"position": 0})
    on_cancel: Callable[[str], None] | None = field(default=None)
    """None: cannot be cancelled"""
    cancelled: bool = False

    def cancel(self, reason: str) -> None:
        """Ask for its end, for this reason; only the first time counts. It still ends by its terminal event."""
        if self.on_cancel is not None and not self.cancelled:
            self.cancelled = True
            self.log.info("cancel", reason=reason)
            self.on_cancel(reason)


class Sessions:
    """Owned by the loop's thread. A request ends here exactly once, with `done`, `result` or `error`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._by_id: dict[str, Session] = {}
        self._by_peer: dict[Peer, set[str]] = defaultdict(set)
        self.server: Server

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_id.values()))

    def get(self, id: str) -> Session | None:
        return self._by_id.get(id)

    def open(self, peer: Peer, message: Message) -> Session:
        """Raises BadRequest when a request with this id is live."""
        if message.id in self._by_id:
            raise BadRequest("a request with this id is running", id=message.id)
        now = time.monotonic()
        log = logger.bind(request=message.id)
        kind = message.kind if message.kind in KNOWN else "unknown"  # what a client types goes into no log or metric
        session = Session(message.id, peer, kind, message.packed, now, log, heard=now)
        self._by_id[session.id] = session
        self._by_peer[peer].add(session.id)
        self._metrics.add(Count.REQUESTS, session.kind)
        return session

    def tell(self, session: Session, kind: str, body: dict[str, Any]) -> None:
        """`queued` or `progress`, with the model's name; repeated while nothing else comes."""
        if session.id in self._by_id:
            session.repeat = (kind, body)
            session.heard = time.monotonic()
            named = {**body, "model": session.model} if session.model else body
            self.server.send(session.peer, wire.message(kind, session.id, named))

    def forward(self, session: Session, header: bytes, event: Event) -> None:
        """A worker's event that ends nothing, body unread unless it is small and worth repeating."""
        if event.kind in ("queued", "progress"):
            self.tell(session, event.kind, wire.unpack(event.packed))
            return
        session.heard = time.monotonic()
        self.server.forward(session.peer, header, event.packed, event.encode())

    def finish(self, session: Session, kind: str, body: dict[str, Any], outcome: str = "done") -> None:
        """The terminal event; later ones are dropped."""
        if self._close(session):
            self._metrics.add(Count.FINISHED, outcome)
            self._log_end(session, outcome, body.get("stats"))
            self.server.send(session.peer, wire.message(kind, session.id, body))

    def fail(self, session: Session, problem: KvdError) -> None:
        if self._close(session):
            self._metrics.add(Count.FINISHED, problem.code)
            self._log_end(session, problem.code)
            self.server.send(session.peer, error(session.id, problem))

    def gone(self, peer: Peer, reason: str) -> None:
        """The client is dead or cannot follow: cancel what it asked for."""
        for id in list(self._by_peer.get(peer, ())):
            if session := self._by_id.get(id):  # ending one finds the client dead again, which ends the others
                session.cancel(reason)

    def beat(self, now: float) -> None:
        """Repeat the last event to whom nothing was said for a while: by that a dead client is found."""
        for session in self:
            if now - session.heard >= wire.BEAT_S * 0.7 and session.id in self._by_id:
                self.tell(session, *session.repeat)

    def _log_end(self, session: Session, outcome: str, stats: object = None) -> None:
        """Work is worth a line, with what it took; that somebody looks at `status` every second is not."""
        say = session.log.info if session.kind in WORK_KINDS else session.log.debug
        took = {name: stats[name] for name in LOGGED if name in stats} if isinstance(stats, dict) else {}
        say("end", kind=session.kind, outcome=outcome, seconds=round(time.monotonic() - session.born, 3), **took)

    def _close(self, session: Session) -> bool:
        if self._by_id.pop(session.id, None) is None:
            return False
        mine = self._by_peer[session.peer]
        mine.discard(session.id)
        if not mine:
            del self._by_peer[session.peer]
        return True


def cancelled(reason: str) -> Cancelled:
    """For a request that no worker has yet."""
    return Cancelled(f"cancelled while waiting: {reason}", reason=reason)


def late(limit_s: float | None) -> Timeout:
    """For a request that no worker had within its own time limit."""
    return Timeout(f"{limit_s} s passed before the model was loaded", limit_s=limit_s, stage="load")
