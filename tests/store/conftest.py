"""A store in a temporary folder, with a clock that the test moves, and single steps of a worker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvd.store.base import Limits, Refusal, Report, Reservation, Written
from kvd.store.shard import offer_of, store_shard
from kvd.store.store import Store
from kvd.store.upkeep import Round
from torments.actor import Actor
from torments.blocks import payload


@dataclass
class World:
    """`open` gives a store (one at a time) and an actor that plays its worker."""

    folder: str
    now: float = 2_000_000_000.0
    stores: list[Store] = field(default_factory=list)

    def open(self, limit: int = 8_000_000, files: Any = None, open_kv: Any = None, **limits: Any) -> Actor:
        store = Store.open(self.folder, Limits(limit, **limits), files, clock=lambda: self.now, open_kv=open_kv)
        self.stores.append(store)
        return Actor(store, files) if files else Actor(store)

    def reopen(self, limit: int = 8_000_000, **limits: Any) -> Actor:
        self.stores[-1].close()
        return self.open(limit, **limits)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(str(tmp_path / "store"))
    yield made
    for store in made.stores:
        store.close()


@pytest.fixture
def actor(world: World) -> Actor:
    return world.open()


def reserve(actor: Actor, tokens: list[int], index: int = -1) -> Reservation | Refusal:
    return actor.store.reserve(offer_of(actor.blocks(tokens)[index]))


def write(actor: Actor, place: Reservation, tokens: list[int], index: int = -1) -> Written:
    block = actor.blocks(tokens)[index]
    size, checksum = store_shard(actor.files, place.temp, place.final, block, payload(block))
    return Written(place.id, checksum, size)


def finish(work: Round) -> Report:
    """Run a round of upkeep to its end."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            report: Report = end.value
            return report
