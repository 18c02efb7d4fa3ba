"""F19: power cuts on a drive that loses, halves and reorders what was not synced; an index older than its shards."""

from __future__ import annotations

import os
import random
import shutil

from kvd.store.base import Limits
from kvd.store.lossy import LossyFiles
from kvd.store.store import Store
from torments.actor import Actor
from torments.kills import prompt
from torments.oracle import Outcome, aftermath, crash, place, room

LIMIT = room(1_200_000)
HELD = 3


def run(quick: bool = False, cuts: int = 300) -> Outcome:
    outcome = Outcome("lost writes")
    with place() as base:
        kept: list[int] = []
        for seed in range(1, (20 if quick else cuts) + 1):
            with outcome.run(f"power cut {seed}"):
                _once(outcome, base, kept, random.Random(seed), seed)
    return outcome


def _once(outcome: Outcome, base: str, kept: list[int], rng: random.Random, seed: int) -> None:
    folder, aside, data = os.path.join(base, "store"), os.path.join(base, "aside"), "index/data.mdb"
    os.makedirs(aside, exist_ok=True)
    files = LossyFiles(aside)
    store = Store.open(folder, Limits(LIMIT), files)
    store.tend()
    actor = Actor(store, files)
    if rng.random() < 0.5:
        shutil.copyfile(os.path.join(folder, data), os.path.join(base, "older"))
        outcome.counts["index older than its shards"] += 1
    for step in range(rng.randrange(1, 9)):
        tokens = prompt(seed * 1000 + step)
        if actor.put(tokens, group=rng.random() < 0.5) == len(tokens) and step % 3 == 0:
            store.pin(actor.namespace, [block.chain for block in actor.blocks(tokens)])
            kept.append(seed * 1000 + step)
        if len(kept) > HELD:
            for block in actor.blocks(prompt(kept.pop(0))):
                store.unpin(block.chain)
    _leave_unfinished(actor, files, rng, seed)
    crash(store)
    files.power_cut(rng)
    if os.path.exists(os.path.join(base, "older")):
        os.replace(os.path.join(base, "older"), os.path.join(folder, data))
    shutil.rmtree(aside)
    outcome.counts["power cuts"] += 1
    aftermath(outcome, folder, Limits(LIMIT), [prompt(name) for name in kept], f"cut {seed}")


def _leave_unfinished(actor: Actor, files: LossyFiles, rng: random.Random, seed: int) -> None:
    """The cut comes while blocks are somewhere between their reservation and their commit, without a sync of theirs."""
    actor.durable = False
    kind = rng.randrange(3)
    if kind:
        for block in actor.blocks(prompt(seed * 1000 + 900))[:3]:
            actor._write(block)
    if kind == 2:
        store = actor.store
        store.core.evict(20_000, store.core.table.slots.values(), "test", store.core.held())
