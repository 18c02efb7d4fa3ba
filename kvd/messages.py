"""What the front and a worker say to each other, as types.

Every message travels as `kvclient.wire.Message` (two frames). Work for a worker and events for a client keep the body
as the client or the worker packed it, so that the front forwards it unread; all others unpack into one dataclass each.

    front -> worker   Work  Cancel  LookedUp  Reserved  Committed  Granted  Stop
    worker -> front   Ready  Failed  Event  Lookup  Reserve  Written  Abandon  BadShard  Touched  Grow  Beat
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from kvclient.errors import KvdError, ProtocolError, from_wire
from kvclient.wire import Message, message
from kvd.codec import build, plain

WORK_KINDS: Final = frozenset({"generate", "warm", "explain", "count"})
EVENT_KINDS: Final = frozenset(
    {"queued", "progress", "text", "reasoning", "tool_call", "finish", "done", "error", "result"}
)
NOBODY: Final = "-"
"""Request id of messages that belong to no request."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored block as the index knows it. `tokens` is a count, `path` absolute, `size` bytes of the whole shard."""

    chain: bytes
    parent: bytes
    tokens: int
    path: str
    size: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class CommittedItem:
    """`ok` means durable. Otherwise `reason` is a counter's name and the block is not in the store."""

    reservation: int
    ok: bool
    reason: str = ""


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
class _Typed:
    """A message whose body has exactly the dataclass's fields."""

    KIND: ClassVar[str]

    def encode(self) -> Message:
        return message(self.KIND, NOBODY, plain(self))


@dataclass(frozen=True, slots=True)
class Cancel(_Typed):
    """Stop request `id` within one step or chunk; its full blocks stay. The worker still sends a terminal event."""

    KIND = "cancel"
    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class LookedUp(_Typed):
    """Answer to Lookup `q`. `hits` follow each other from the asked start; `child` is a stored child of the last hit of
    which the first `child_rows` tokens match."""

    KIND = "looked_up"
    q: int
    hits: tuple[Entry, ...]
    child: Entry | None
    child_rows: int


@dataclass(frozen=True, slots=True)
class Reserved(_Typed):
    """Answer to Reserve `q`. Write to `temp`, fsync if `durable`, rename to `final`, then send Written or Abandon. With
    `ok` false nothing may be written and `reason` is a counter's name."""

    KIND = "reserved"
    q: int
    ok: bool
    reservation: int = 0
    temp: str = ""
    final: str = ""
    reason: str = ""
    durable: bool = True


@dataclass(frozen=True, slots=True)
class Committed(_Typed):
    KIND = "committed"
    items: tuple[CommittedItem, ...]


@dataclass(frozen=True, slots=True)
class Granted(_Typed):
    """Answer to Grow `q`. With `ok` false the pool must stay as it is; `available` bytes are left in the budget."""

    KIND = "granted"
    q: int
    ok: bool
    available: int


@dataclass(frozen=True, slots=True)
class Stop(_Typed):
    """Finish what runs within `drain_s` seconds (0: cancel it now), flush, exit with status 0."""

    KIND = "stop"
    drain_s: float


@dataclass(frozen=True, slots=True)
class Ready(_Typed):
    """The model is loaded. `info` is shown in `models` and `status`; the front itself reads `weights_bytes`,
    `pool_bytes` (now) and `pool_limit_bytes`."""

    KIND = "ready"
    info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Failed(_Typed):
    """The load failed; the worker exits after sending this. `error` is a KvdError's wire form."""

    KIND = "failed"
    error: dict[str, Any]

    @classmethod
    def of(cls, problem: KvdError) -> Failed:
        return cls(problem.to_wire())

    def problem(self) -> KvdError:
        return from_wire(self.error)


@dataclass(frozen=True, slots=True)
class Lookup(_Typed):
    """What of a prompt is stored? `chains` are those of the full blocks that follow `parent` (for a prompt from its
    start the namespace), `tail` all token ids that follow `parent`."""

    KIND = "lookup"
    q: int
    namespace: bytes
    chains: tuple[bytes, ...]
    parent: bytes
    tail: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reserve(_Typed):
    """Room for one block: `tokens` are its ids, `start` the position of the first, `nbytes` the size of its shard,
    `preview` the first words of its text."""

    KIND = "reserve"
    q: int
    namespace: bytes
    chain: bytes
    parent: bytes
    tokens: tuple[int, ...]
    start: int
    nbytes: int
    preview: str


@dataclass(frozen=True, slots=True)
class Written(_Typed):
    """The shard of a reservation is fsynced and renamed to its final name; `size` in bytes."""

    KIND = "written"
    reservation: int
    checksum: bytes
    size: int


@dataclass(frozen=True, slots=True)
class Abandon(_Typed):
    KIND = "abandon"
    reservation: int
    reason: str


@dataclass(frozen=True, slots=True)
class BadShard(_Typed):
    """A shard that did not check out: to be quarantined."""

    KIND = "bad_shard"
    namespace: bytes
    chain: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Touched(_Typed):
    """Blocks that were used, in memory or from the store."""

    KIND = "touched"
    namespace: bytes
    chains: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PinPath(_Typed):
    """Keep the stored prefix that ends with the last of `chains` from eviction, for `ttl_s` seconds; 0: for good."""

    KIND = "pin_path"
    namespace: bytes
    chains: tuple[bytes, ...]
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Grow(_Typed):
    """May the pool take `nbytes` more than it has? Asked before it grows beyond `--pool-initial`, answered at once; the
    front keeps one ledger over all models. Negative: given back, not answered."""

    KIND = "grow"
    q: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Beat(_Typed):
    """Every second, from a thread without MLX. `phase` is "loading", "idle" or what the engine does; `since_s` the
    seconds since its last chunk or step ended, `expected_s` how long the one in hand should take; `stats` plain numbers
    for `status` (`pool_bytes`, `live`, `waiting`, …)."""

    KIND = "beat"
    phase: str
    since_s: float
    expected_s: float
    stats: dict[str, Any]


ToWorker = Work | Cancel | LookedUp | Reserved | Committed | Granted | Stop
ToFront = Ready | Failed | Event | Lookup | Reserve | Written | Abandon | BadShard | Touched | PinPath | Grow | Beat

_TO_WORKER: Final[dict[str, type[Any]]] = {c.KIND: c for c in (Cancel, LookedUp, Reserved, Committed, Granted, Stop)}
_TO_FRONT: Final[dict[str, type[Any]]] = {
    c.KIND: c for c in (Ready, Failed, Lookup, Reserve, Written, Abandon, BadShard, Touched, PinPath, Grow, Beat)
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
