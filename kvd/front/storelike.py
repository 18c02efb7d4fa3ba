"""The store and the workers as the store's thread sees them, and how the store is opened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvd.config import Config
from kvd.front.reload import limits
from kvd.home import Home
from kvd.messages import CommittedItem, LookedUp, Offer, Reserve, Reserved, ToWorker, Written
from kvd.store.base import Found, Limits, Refusal, Reservation
from kvd.store.departed import Departure

if TYPE_CHECKING:
    from kvd.store.store import Store

DISK = "disk.json"
"""in the home's `run`: where the store's disk was mounted"""


class StoreLike(Protocol):
    """What the front needs of `kvd.store.Store`."""

    def lookup(self, namespace: bytes, chains: Sequence[bytes], parent: bytes, tail: Sequence[int]) -> Found: ...
    def reserve(self, offer: Offer) -> Reservation | Refusal: ...
    def label(self, namespace: bytes, model: str) -> None: ...
    def commit(self, written: list[Written]) -> list[CommittedItem]: ...
    def abandon(self, reservation: int, reason: str) -> None: ...
    def touched(self, namespace: bytes, chains: Sequence[bytes]) -> None: ...
    def pin(self, namespace: bytes, chains: Sequence[bytes], ttl_s: float | None = None) -> object: ...
    def quarantine(self, namespace: bytes, chain: bytes, reason: str) -> None: ...
    def departed(self) -> Sequence[Departure]: ...
    def gone(self) -> str: ...
    def tend(self) -> bool: ...
    def set_limits(self, limits: Limits) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


class Asker(Protocol):
    """A worker, as the store thread sees it. `send` is called on the loop's thread."""

    @property
    def run(self) -> int: ...
    @property
    def model(self) -> str: ...
    def send(self, message: ToWorker) -> None: ...


def reserve(store: StoreLike, model: str, offer: Offer) -> Reservation | Refusal:
    """As a worker of this model asked."""
    store.label(offer.namespace, model)
    return store.reserve(offer)


def nothing(asked: Any, reason: str) -> ToWorker:
    """The answer to a lookup or a reserve that the store is not asked."""
    return Reserved(asked.q, False, reason=reason) if isinstance(asked, Reserve) else LookedUp(asked.q, (), None, 0)


def open_store(config: Config) -> Store:
    """The store of this configuration, for its one owner. Raises StoreError: in use (details: pid), its disk is not
    mounted, the folder cannot be used."""
    from kvd.store import mount  # late: `status` is answered before LMDB is loaded
    from kvd.store.store import Store

    root, memory = str(config.store_path), Home(config.home).run / DISK
    mount.check(root, memory)
    mount.remember(root, memory)
    return Store.open(root, limits(config))
