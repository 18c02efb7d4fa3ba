"""Which workers hold blocks for stored, and what they must be told when blocks leave. Pure; of the store's thread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Final, Generic, Protocol, TypeVar

from kvd.messages_store import Departed
from kvd.store.departed import Departure

CHAINS_MOST: Final = 8192
"""chains in one message"""


class Member(Protocol):
    @property
    def run(self) -> int: ...


M = TypeVar("M", bound=Member)


class Audience(Generic[M]):
    """A worker belongs to it from its first stored or reserved block of a namespace on."""

    def __init__(self) -> None:
        self._members: defaultdict[bytes, dict[int, M]] = defaultdict(dict)

    def join(self, namespace: bytes, member: M) -> None:
        self._members[namespace][member.run] = member

    def leave(self, run: int) -> None:
        """That worker is gone."""
        for members in self._members.values():
            members.pop(run, None)
        for namespace in [n for n, members in self._members.items() if not members]:
            del self._members[namespace]

    def told(self, departures: Iterable[Departure]) -> Iterator[tuple[M, Departed]]:
        """Whom to send what."""
        for departure in departures:
            if departure.namespace is None:
                everybody = {run: member for members in self._members.values() for run, member in members.items()}
                yield from ((member, Departed((), (), everything=True)) for member in everybody.values())
                continue
            for member in list(self._members.get(departure.namespace, {}).values()):
                yield from ((member, message) for message in batches(departure))


def batches(departure: Departure) -> Iterator[Departed]:
    """Messages of a bearable size; parents and chains need not travel together."""
    chains, parents = departure.chains, departure.parents
    for at in range(0, max(len(chains), len(parents)), CHAINS_MOST):
        yield Departed(chains[at : at + CHAINS_MOST], parents[at : at + CHAINS_MOST])
