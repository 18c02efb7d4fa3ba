"""What a worker and the store say to each other, as types. See `kvd.messages`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from kvclient.wire import Message, message
from kvd.codec import plain

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
class Offer:
    """A block for the store: `tokens` are its ids, `start` the position of the first, `nbytes` the size of its shard,
    `preview` the first words of its text."""

    namespace: bytes
    chain: bytes
    parent: bytes
    tokens: tuple[int, ...]
    start: int
    nbytes: int
    preview: str = ""


@dataclass(frozen=True, slots=True)
class CommittedItem:
    """`ok` means durable. Otherwise `reason` is a counter's name and the block is not in the store."""

    reservation: int
    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Typed:
    """A message whose body has exactly the dataclass's fields."""

    KIND: ClassVar[str]

    def encode(self) -> Message:
        return message(self.KIND, NOBODY, plain(self))


@dataclass(frozen=True, slots=True)
class Lookup(Typed):
    """What of a prompt is stored? `chains` are those of the full blocks that follow `parent` (for a prompt from its
    start the namespace), `tail` all token ids that follow `parent`."""

    KIND = "lookup"
    q: int
    namespace: bytes
    chains: tuple[bytes, ...]
    parent: bytes
    tail: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LookedUp(Typed):
    """Answer to Lookup `q`. `hits` follow each other from the asked start; `child` is a stored child of the last hit of
    which the first `child_rows` tokens match; `child_token` is the one behind those, where it has more."""

    KIND = "looked_up"
    q: int
    hits: tuple[Entry, ...]
    child: Entry | None
    child_rows: int
    child_token: int | None = None


@dataclass(frozen=True, slots=True)
class Reserve(Typed):
    """Room for one block."""

    KIND = "reserve"
    q: int
    offer: Offer


@dataclass(frozen=True, slots=True)
class Reserved(Typed):
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
class Written(Typed):
    """The shard of a reservation is fsynced and renamed to its final name; `size` in bytes."""

    KIND = "written"
    reservation: int
    checksum: bytes
    size: int


@dataclass(frozen=True, slots=True)
class Committed(Typed):
    KIND = "committed"
    items: tuple[CommittedItem, ...]


@dataclass(frozen=True, slots=True)
class Abandon(Typed):
    KIND = "abandon"
    reservation: int
    reason: str


@dataclass(frozen=True, slots=True)
class BadShard(Typed):
    """A shard that did not check out: to be quarantined."""

    KIND = "bad_shard"
    namespace: bytes
    chain: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Touched(Typed):
    """Blocks that were used, in memory or from the store."""

    KIND = "touched"
    namespace: bytes
    chains: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PinPath(Typed):
    """Keep the stored prefix that ends with the last of `chains` from eviction, for `ttl_s` seconds; 0: for good."""

    KIND = "pin_path"
    namespace: bytes
    chains: tuple[bytes, ...]
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Departed(Typed):
    """Blocks that are not in the store any more, whatever was said of them before. `parents` are theirs: a shorter
    block there may have counted as stored for being the beginning of one that departed. `everything`: nothing is
    known to be stored."""

    KIND = "departed"
    chains: tuple[bytes, ...]
    parents: tuple[bytes, ...]
    everything: bool = False
