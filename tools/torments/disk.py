"""F17 and F23: a folder that is too full at the start, a slow disk, a full one, one that vanishes, a shard deleted."""

from __future__ import annotations

import os
import time

from kvd.store.base import Limits
from kvd.store.faults import Faults, FaultyFiles
from kvd.store.store import Store
from torments.actor import Actor
from torments.oracle import Outcome, aftermath, du, place, room

LIMIT = room(1_500_000)
START_S = 1.0
BUSY_START_S = 10.0
"""in the tests, which run on busy machines"""
SCENARIO_S = 300
"""a scenario is hundreds of calls; each of them alone would be a hang far earlier"""


def run(quick: bool = False) -> Outcome:
    outcome = Outcome("limits and bad disks")
    with place() as base:
        for scenario in (_too_full, _traffic, _full, _slow, _gone, _deleted):
            with outcome.run(scenario.__name__.strip("_"), SCENARIO_S):
                scenario(outcome, os.path.join(base, scenario.__name__), quick)
    return outcome


def _tokens(number: int) -> list[int]:
    return [number % 7, 1, 2, 3, number, 5, 6, 7, 8, number]


def _too_full(outcome: Outcome, folder: str, quick: bool) -> None:
    """A start that finds three times its limit, foreign files included, is under it within a second."""
    with Store.open(folder, Limits(8 * LIMIT)) as store:
        actor = Actor(store)
        number = 0
        while store.core.ledger.shards < 2 * LIMIT:
            actor.put(_tokens(number), group=True)
            number += 1
    for place_ in ("blocks", "tmp", ".", "blocks/" + actor.namespace.hex(), "index"):
        with open(os.path.join(folder, place_, "foreign.bin"), "wb") as file:
            file.write(os.urandom(LIMIT // 4))
    os.makedirs(os.path.join(folder, "blocks/old/deep"), exist_ok=True)
    with open(os.path.join(folder, "blocks/old/deep/file"), "wb") as file:
        file.write(os.urandom(LIMIT // 4))
    outcome.counts["bytes at the start"] = du(folder)
    began = time.monotonic()
    with Store.open(folder, Limits(LIMIT)) as store:
        took = time.monotonic() - began
        outcome.sample(folder, LIMIT)
        if not store.stats()["counters"].get("foreign"):
            outcome.fail("foreign files were not counted")
        if not len(store.core.table):
            outcome.fail("everything was evicted")
    if took > (BUSY_START_S if quick else START_S):
        outcome.fail(f"{took:.1f} s until the limit held")


def _traffic(outcome: Outcome, folder: str, quick: bool) -> None:
    """Ten times the limit is written by three models; `du` is taken after every step."""
    with Store.open(folder, Limits(LIMIT, quota=LIMIT // 2)) as store:
        number = 0
        while store.core.wear.total < (2 if quick else 10) * LIMIT:
            actor = Actor(store, namespace=bytes([number % 3]) * 16, layers=2 + number % 3)
            actor.put(_tokens(number), group=number % 2 == 0)
            outcome.sample(folder, LIMIT)
            actor.get(_tokens(max(0, number - 5)))
            number += 1
            for namespace, used in store.core.table.by_namespace.items():
                if used > LIMIT // 2:
                    outcome.fail(f"{namespace.hex()} holds {used}, its quota is {LIMIT // 2}")
        outcome.counts += store.core.counters
    aftermath(outcome, folder, Limits(LIMIT), [], "traffic")


def _full(outcome: Outcome, folder: str, quick: bool) -> None:
    """ENOSPC long before the limit: refusals with a reason, nothing lost, and it goes on when room comes back."""
    faults = Faults(capacity=300_000)
    with Store.open(folder, Limits(LIMIT, free_space=50_000), FaultyFiles(faults)) as store:
        actor = Actor(store, FaultyFiles(faults))
        kept = [_tokens(n) for n in range(60) if actor.put(_tokens(n)) == 10][:3]
        outcome.counts["refused for free space"] += store.core.counters["refused.free_space"]
        faults.capacity = 0
        if actor.put([9, 9, 9]):
            outcome.fail("acknowledged on a full disk")
        faults.capacity = None
        kept = [tokens for tokens in kept if actor.get(tokens) == 10]
        if actor.put([8, 8, 8]) != 3:
            outcome.fail(f"not storing again after room came back: {actor.reasons[-3:]}")
    aftermath(outcome, folder, Limits(LIMIT), [*kept, [8, 8, 8]], "full disk")


def _slow(outcome: Outcome, folder: str, quick: bool) -> None:
    faults = Faults(delay_s=0.0005)
    with Store.open(folder, Limits(LIMIT), FaultyFiles(faults)) as store:
        actor = Actor(store, FaultyFiles(faults))
        if actor.put(_tokens(1)) != 10 or actor.get(_tokens(1)) != 10:
            outcome.fail("a slow disk is not an error")
    aftermath(outcome, folder, Limits(LIMIT), [_tokens(1)], "slow disk")


def _gone(outcome: Outcome, folder: str, quick: bool) -> None:
    """The volume is unmounted and comes back: misses and refusals meanwhile, everything there afterwards."""
    faults = Faults()
    with Store.open(folder, Limits(LIMIT), FaultyFiles(faults)) as store:
        actor = Actor(store, FaultyFiles(faults))
        actor.put(_tokens(1))
        faults.gone = True
        actor.get(_tokens(1))
        store.tend()
        if actor.put(_tokens(2)) > 4 or not store.stats()["offline"]:
            outcome.fail("status does not say that the disk is gone")
        faults.gone = False
        store.tend()
        if actor.get(_tokens(1)) != 10 or actor.put(_tokens(2)) != 10:
            outcome.fail("not back after the disk came back")
    aftermath(outcome, folder, Limits(LIMIT), [_tokens(1), _tokens(2)], "vanished disk")


def _deleted(outcome: Outcome, folder: str, quick: bool) -> None:
    """Somebody deletes a shard: one miss, then it is stored anew."""
    with Store.open(folder, Limits(LIMIT)) as store:
        actor = Actor(store)
        actor.put(_tokens(1))
        os.unlink(store.core.tree.shard(actor.namespace, actor.blocks(_tokens(1))[1].chain))
        if (actor.get(_tokens(1)), actor.get(_tokens(1))) != (4, 4):
            outcome.fail("a deleted shard is a miss")
        if actor.put(_tokens(1)) != 10 or actor.get(_tokens(1)) != 10:
            outcome.fail("not stored anew")
    aftermath(outcome, folder, Limits(LIMIT), [_tokens(1)], "deleted shard")
