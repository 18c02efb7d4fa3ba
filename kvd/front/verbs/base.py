"""What every verb of the daemon is: one small class that turns a checked body into the body of its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from kvd.config import Config
from kvd.front.fleet import Fleet
from kvd.front.memory import Ledger
from kvd.front.metrics import Metrics
from kvd.front.registry import Registry
from kvd.front.sessions import Session, Sessions
from kvd.front.storethread import StoreThread

Body = dict[str, Any]


@dataclass(slots=True)
class Services:
    """The parts of the front that verbs use. `shutdown(drain_s)` begins the stop and returns; `reload()` gives the keys
    that were applied and those that wait for a restart."""

    config: Config
    registry: Registry
    fleet: Fleet
    ledger: Ledger
    sessions: Sessions
    store: StoreThread
    metrics: Metrics
    shutdown: Callable[[float | None], None]
    reload: Callable[[], tuple[list[str], list[str]]]
    born: float
    """wall-clock time of the start"""


@dataclass(frozen=True, slots=True)
class Call:
    """One request for a verb. `body` has passed `kvclient.fields.checked`."""

    session: Session
    body: Body
    services: Services


class Verb(Protocol):
    name: str

    async def run(self, call: Call) -> Body:
        """The result's body. Raises KvdError."""
        ...
