"""What the front and a worker say to each other, as types.

Every message travels as `kvclient.wire.Message` (two frames). Work for a worker and events for a client keep the body
as the client or the worker packed it, so that the front forwards it unread; all others unpack into one dataclass each.

    front -> worker   Work  Cancel  LookedUp  Reserved  Committed  Departed  Clear  Granted  Stop
    worker -> front   Ready  Failed  Event  Lookup  Reserve  Written  Abandon  BadShard  Touched  Cleared  Grow  Beat
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kvclient.errors import KvdError, ProtocolError, from_wire
from kvclient.wire import Message
from kvd.codec import build
from kvd.messages_store import (
    NOBODY,
    Abandon,
    BadShard,
    Committed,
    CommittedItem,
    Departed,
    Entry,
    LookedUp,
    Lookup,
    Offer,
    PinPath,
    Reserve,
    Reserved,
    Touched,
    Typed,
    Written,
)

__all__ = [
    "EVENT_KINDS", "NOBODY", "WORK_KINDS", "Abandon", "BadShard", "Beat", "Cancel", "Clear", "Cleared", "Committed",
    "CommittedItem", "Departed", "Entry", "Event", "Failed", "Granted", "Grow", "LookedUp", "Lookup", "Offer",
    "PinPath", "Ready", "Reserve", "Reserved", "Stop", "ToFront", "ToWorker", "Touched", "Work", "Written", "to_front",
    "to_worker",
]

WORK_KINDS: Final = frozenset({"generate", "warm", "explain", "count"})
EVENT_KINDS: Final = frozenset(
    {"queued", "progress", "text", "reasoning", "tool_call", "finish", "done", "error", "result"}
)


@dataclass(frozen=True, slots=True)
class Work:
    """A client's request, body as the client packed it. `kind` is one of WORK_KINDS."""

    kind: str
    id: str
    packed: bytes

    def encode(self) -> Message:
        return Message(self.kind, self.id, self.packed)


@dataclass(frozen=True, slots=True)
class Event:
    """An event for the client of request `id`, body as the worker packed it. `kind` is one of EVENT_KINDS."""

    kind: str
    id: str
    packed: bytes

    def encode(self) -> Message:
        return Message(self.kind, self.id, self.packed)


@dataclass(frozen=True, slots=True)
class Cancel(Typed):
    """Stop request `id` within one step or chunk; its full blocks stay. The worker still sends a terminal event."""

    KIND = "cancel"
    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Clear(Typed):
    """Forget what memory holds and no request uses, of these namespaces; of all if there are none. Answered by Cleared
    with the same `q`."""

    KIND = "clear"
    q: int
    namespaces: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Granted(Typed):
    """Answer to Grow `q`. With `ok` false the pool must stay as it is; `available` bytes are left in the budget.
    `coming`: others are giving way, asked again soon it may be granted."""

    KIND = "granted"
    q: int
    ok: bool
    available: int
    coming: bool = False


@dataclass(frozen=True, slots=True)
class Stop(Typed):
    """Finish what runs within `drain_s` seconds (0: cancel it now), flush, exit with status 0."""

    KIND = "stop"
    drain_s: float


@dataclass(frozen=True, slots=True)
class Ready(Typed):
    """The model is loaded. `info` is shown in `models` and `status`; the front itself reads `weights_bytes`,
    `pool_bytes` (now) and `pool_limit_bytes`."""

    KIND = "ready"
    info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Failed(Typed):
    """The load failed; the worker exits after sending this. `error` is a KvdError's wire form."""

    KIND = "failed"
    error: dict[str, Any]

    @classmethod
    def of(cls, problem: KvdError) -> Failed:
        return cls(problem.to_wire())

    def problem(self) -> KvdError:
        return from_wire(self.error)


@dataclass(frozen=True, slots=True)
class Cleared(Typed):
    """Answer to Clear `q`: `blocks` with `nbytes` were forgotten, `in_use` are held by requests and stay."""

    KIND = "cleared"
    q: int
    blocks: int
    nbytes: int
    in_use: int


@dataclass(frozen=True, slots=True)
class Grow(Typed):
    """May the pool take `nbytes` more than it has? Asked before it grows beyond `--pool-initial`, answered at once; the
    front keeps one ledger over all models. Negative: given back, not answered. `needed`: live sequences cannot go on
    without it, so that idle models give way."""

    KIND = "grow"
    q: int
    nbytes: int
    needed: bool = False


@dataclass(frozen=True, slots=True)
class Beat(Typed):
    """Every second, from a thread without MLX. `phase` is "loading", "idle" or what the engine does; `since_s` the
    seconds since its last chunk or step ended, `expected_s` how long the one in hand should take; `stats` plain numbers
    for `status` (`pool_bytes`, `live`, `waiting`, …)."""

    KIND = "beat"
    phase: str
    since_s: float
    expected_s: float
    stats: dict[str, Any]


ToWorker = Work | Cancel | LookedUp | Reserved | Committed | Departed | Clear | Granted | Stop
ToFront = (
    Ready | Failed | Event | Lookup | Reserve | Written | Abandon | BadShard | Touched | PinPath | Cleared | Grow | Beat
)

_TO_WORKER: Final[dict[str, type[Any]]] = {
    c.KIND: c for c in (Cancel, LookedUp, Reserved, Committed, Departed, Clear, Granted, Stop)
}
_TO_FRONT: Final[dict[str, type[Any]]] = {
    c.KIND: c
    for c in (Ready, Failed, Lookup, Reserve, Written, Abandon, BadShard, Touched, PinPath, Cleared, Grow, Beat)
}


def to_worker(received: Message) -> ToWorker:
    """Decode at the worker. Raises ProtocolError for an unknown kind or a body that does not fit it."""
    if received.kind in WORK_KINDS:
        return Work(received.kind, received.id, received.packed)
    decoded: ToWorker = _decode(_TO_WORKER, received)
    return decoded


def to_front(received: Message) -> ToFront:
    """Decode at the front. Raises ProtocolError for an unknown kind or a body that does not fit it."""
    if received.kind in EVENT_KINDS:
        return Event(received.kind, received.id, received.packed)
    decoded: ToFront = _decode(_TO_FRONT, received)
    return decoded


def _decode(known: dict[str, type[Any]], received: Message) -> Any:
    kind = known.get(received.kind)
    if kind is None:
        raise ProtocolError(f"unknown message {received.kind[:32]!r}")
    return build(kind, received.body)
