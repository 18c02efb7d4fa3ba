"""Whatever takes a block out of the store, the owner says so: workers must not go on calling it stored."""

from __future__ import annotations

import os

import pytest

from kvd.store.base import Limits
from kvd.store.departed import EVERYTHING
from kvd.store.upkeep import clear, gc, rebuild, verify
from tests.store.conftest import World, finish
from torments.actor import Actor
from torments.blocks import NAMESPACE

PROMPT = list(range(1, 11))


def chains(actor: Actor, tokens: list[int]) -> list[bytes]:
    return [block.chain for block in actor.blocks(tokens)]


def left(actor: Actor) -> set[bytes]:
    """Chains that departed; their parents are told with them."""
    found = actor.store.departed()
    assert all(one.namespace == NAMESPACE and one.parents for one in found)
    return {chain for one in found for chain in one.chains}


def damage(actor: Actor, tokens: list[int], index: int) -> bytes:
    block = actor.blocks(tokens)[index]
    os.truncate(actor.store.core.tree.shard(NAMESPACE, block.chain), 5000)
    return block.chain


def test_a_stored_block_has_not_departed(actor: Actor) -> None:
    actor.put(PROMPT)
    actor.get(PROMPT)
    assert left(actor) == set()


def test_evicted_blocks_depart_with_their_parents(world: World) -> None:
    actor = world.open(900_000)
    actor.put(PROMPT)
    world.now += 1
    for n in range(60):
        actor.put([n + 100, 1])
    parents = {parent for one in actor.store.departed() for parent in one.parents}
    assert actor.get(PROMPT) == 0
    assert set(chains(actor, PROMPT)[:-1]) < parents


def test_a_lowered_limit_and_a_clear_say_what_left(actor: Actor) -> None:
    for n in range(30):
        actor.put([n, 1, 2, 3, 4])
    everything = {slot.chain for slot in actor.store.core.table}
    actor.store.set_limits(Limits(650_000))
    first = left(actor)
    assert first and first == everything - {slot.chain for slot in actor.store.core.table}
    finish(clear(actor.store.core))
    assert left(actor) == everything - first


@pytest.mark.parametrize("how", ["verify", "reader", "rebuild"])
def test_a_damaged_block_departs_whoever_finds_it(actor: Actor, how: str) -> None:
    actor.put(PROMPT)
    chain = damage(actor, PROMPT, 2)
    if how == "verify":
        finish(verify(actor.store.core))
    elif how == "reader":
        assert actor.get(PROMPT) == 8
    else:
        finish(rebuild(actor.store.core))
    assert {c for one in actor.store.departed() for c in one.chains} == {chain}


def test_strays_that_gc_drops_depart(actor: Actor) -> None:
    actor.put(PROMPT)
    damage(actor, PROMPT, 0)
    assert actor.get(PROMPT) == 0
    finish(gc(actor.store.core))
    assert left(actor) == set(chains(actor, PROMPT))


def test_a_tail_that_a_longer_one_contains_is_still_stored(actor: Actor) -> None:
    actor.put([1, 2])
    actor.put([1, 2, 3])
    assert len(actor.store.core.table) == 1 and left(actor) == set()


def test_a_rebuilt_index_loses_nothing(actor: Actor) -> None:
    actor.put(PROMPT)
    finish(rebuild(actor.store.core))
    assert left(actor) == set() and actor.store.departed() != (EVERYTHING,)
