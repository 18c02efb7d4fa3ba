"""Limits, quotas, pins, eviction and wear."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvclient.errors import StoreError
from kvd.cache.chain import next_chain
from kvd.store.base import Limits, Offer, Refusal, Reservation
from kvd.store.departed import EVERYTHING
from kvd.store.shard import store_shard
from kvd.store.upkeep import clear, gc
from tests.store.conftest import World, finish, reserve, write
from torments.actor import BLOCK, Actor
from torments.blocks import NAMESPACE, payload
from torments.oracle import crash, du, room

PROMPT = list(range(1, 11))


def test_the_first_use_is_only_noted_if_the_second_is_to_be_written(world: World) -> None:
    actor = world.open(admission="second")
    assert actor.put(PROMPT) == 0 and actor.reasons == ["first_use"] * 3
    assert actor.put(PROMPT) == len(PROMPT)


def test_first_uses_are_remembered_over_a_restart(world: World) -> None:
    world.open(admission="second").put(PROMPT)
    again = world.reopen(admission="second")
    assert again.put(PROMPT) == len(PROMPT) and again.reasons == []


def test_a_kill_forgets_first_uses_of_the_last_minutes_only(world: World) -> None:
    actor = world.open(admission="second")
    actor.put([1, 2])
    world.now += 301
    actor.store.tend()
    actor.put([3, 4])
    crash(actor.store)
    world.stores.clear()
    again = world.open(admission="second")
    assert (again.put([1, 2]), again.put([3, 4])) == (2, 0)


@pytest.mark.parametrize("damage", ["emptied", "cut", "flipped", "foreign", "deleted"])
def test_a_damaged_list_of_first_uses_costs_a_use_and_nothing_else(world: World, damage: str) -> None:
    actor = world.open(admission="second")
    for n in (1, 2):
        assert actor.put(PROMPT) == len(PROMPT) * (n == 2)
    actor.put([50, 51])
    actor.store.close()
    seen = Path(world.folder, "seen")
    raw = seen.read_bytes()
    flipped = raw[:-1] + bytes([raw[-1] ^ 1])
    seen.write_bytes({"emptied": b"", "cut": raw[:-3], "flipped": flipped, "foreign": b"{}", "deleted": b""}[damage])
    if damage == "deleted":
        seen.unlink()
    again = world.open(admission="second")
    assert again.get(PROMPT) == len(PROMPT)
    assert [again.put([50, 51]) for _ in range(2)] == [0, 2]
    assert again.store.stats()["counters"].get("quarantined.damaged", 0) == (damage != "deleted")


def test_first_uses_are_written_within_the_limit(world: World) -> None:
    actor = world.open(room(600_000), admission="second")
    for n in range(20_000):
        actor.store.reserve(Offer(NAMESPACE, next_chain(NAMESPACE, [n]), NAMESPACE, (n,), 0, 5000))
    world.now += 301
    actor.store.tend()
    assert actor.store.stats()["counters"]["sightings.full"] == 1 and not Path(world.folder, "seen").exists()
    again = world.reopen(2_000_000, admission="second")
    assert du(world.folder) <= 2_000_000 and again.put([1]) == 0


def test_a_full_clear_forgets_first_uses_too(world: World) -> None:
    actor = world.open(admission="second")
    actor.put(PROMPT)
    actor.store.close()
    again = world.open(admission="second")
    finish(clear(again.store.core))
    last = world.reopen(admission="second")
    assert last.put(PROMPT) == 0


def test_a_model_stays_within_its_quota_and_leaves_others_alone(world: World) -> None:
    actor = world.open(quota=60_000)
    other = Actor(actor.store, namespace=b"o" * 16)
    other.put(PROMPT)
    for namespace in (NAMESPACE, b"s" * 16):
        actor.store.label(namespace, "demo")
    for n in range(20):
        Actor(actor.store, namespace=(NAMESPACE, b"s" * 16)[n % 2]).put([n + 100, 5])
        table = actor.store.core.table
        assert table.by_namespace.get(NAMESPACE, 0) + table.by_namespace.get(b"s" * 16, 0) <= 60_000
    assert other.get(PROMPT) == len(PROMPT)
    assert actor.store.stats()["counters"]["evicted.quota"]
    assert actor.store.stats()["models"]["demo"]


def test_blocks_of_two_models_count_for_the_quota_of_both(world: World) -> None:
    actor = world.open(quota=60_000)
    for namespace, name in ((NAMESPACE, "demo"), (NAMESPACE, "two"), (b"s" * 16, "demo"), (b"t" * 16, "two")):
        actor.store.label(namespace, name)
    world.reopen(quota=60_000)
    spaces = (NAMESPACE, b"s" * 16, b"t" * 16)
    for n in range(30):
        Actor(world.stores[-1], namespace=spaces[n % 3]).put([n + 100, 5])
        held = [world.stores[-1].core.table.by_namespace.get(space, 0) for space in spaces]
        assert held[0] + held[1] <= 60_000 and held[0] + held[2] <= 60_000
    assert all(held)


def test_free_space_is_left_to_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvd.store.files import RealFiles, Space

    class Tight(RealFiles):
        free = 10_000_000

        def space(self, path: str) -> Space:
            return Space(self.free, 10**9)

    files = Tight()
    actor = world.open(files=files, free_space=1_000_000)
    assert actor.put(PROMPT) == len(PROMPT)
    files.free = 1_000_000
    assert actor.put([50, 51]) == 0 and "free_space" in actor.reasons
    assert actor.store.stats()["counters"]["evicted.free_space"]


def test_blocks_are_not_dropped_one_after_the_other_where_a_snapshot_keeps_their_bytes(world: World) -> None:
    from kvd.store.files import RealFiles, Space

    class Snapshot(RealFiles):
        """Unlinking frees nothing, until the snapshot goes."""

        free, kept, held = 10_000_000, 0, True

        def unlink(self, path: str) -> None:
            size = self.stat(path).allocated
            super().unlink(path)
            self.kept += size

        def space(self, path: str) -> Space:
            return Space(self.free + (0 if self.held else self.kept), 10**9)

    files = Snapshot()
    actor = world.open(files=files, free_space=1_000_000)
    for n in range(60):
        actor.put([n, 1, 2, 3, 4])
    table = actor.store.core.table
    files.free, before = 900_000, table.bytes

    def lost(tries: int, seconds: float) -> int:
        for n in range(tries):
            world.now += seconds / tries
            assert actor.put([1000 + n, 5]) == 0 and "free_space" in actor.reasons
        return before - table.bytes

    first = lost(20, 59.0)
    assert 0 < first < 250_000, "once, for what is missing and 1/100 of the limit"
    assert lost(500, 3600.0) - first < 6 * 100_000 < table.bytes, "less often each time, 1/100 of the limit"
    assert (tries := actor.store.stats()["counters"]["evicted.in_vain"]) in (6, 7)
    world.now -= 366 * 86_400.0
    lost(1, 1.0)
    assert actor.store.stats()["counters"]["evicted.in_vain"] == tries + 1, "a clock that was a year ahead"
    files.held = False
    world.now += 2 * 3600.0
    assert actor.put([7777, 5]) == 2
    files.held, files.free, files.kept = True, 900_000, 0
    assert not actor.put([8888, 5])


def test_a_lowered_limit_holds_at_once_even_against_pins(actor: Actor) -> None:
    for n in range(30):
        actor.put([n, 1, 2, 3, 4])
    actor.store.pin(NAMESPACE, [b.chain for b in actor.blocks([0, 1, 2, 3, 4])])
    actor.store.set_limits(Limits(room(650_000)))
    assert du(actor.store.core.tree.root) <= room(650_000)
    actor.store.set_limits(Limits(1))
    assert len(actor.store.core.table) == 0
    assert actor.put(PROMPT) == 0


def test_what_a_lower_limit_takes_is_told_and_the_pinned_go_last(world: World) -> None:
    actor = world.open()
    for n in range(30):
        actor.put([n, 1, 2, 3, 4])
    for n in (0, 1):
        actor.store.pin(NAMESPACE, [b.chain for b in actor.blocks([n, 1, 2, 3, 4])])
    table = actor.store.core.table
    blocks, nbytes = len(table), table.bytes
    assert actor.store.stats()["trimmed"] == {}
    actor = world.reopen(room(700_000))
    table = actor.store.core.table
    told = {"blocks": blocks - len(table), "bytes": nbytes - table.bytes, "pinned": 0}
    assert told["blocks"] and actor.store.stats()["trimmed"] == told
    assert actor.get([0, 1, 2, 3, 4]) == actor.get([1, 1, 2, 3, 4]) == 5
    actor.store.set_limits(Limits(1))
    assert actor.store.stats()["trimmed"] == {"blocks": blocks, "bytes": nbytes, "pinned": 4}
    assert (actor.store.stats()["pins"], len(actor.store.core.pins)) == (0, 0)
    assert actor.store.stats()["counters"]["pins_lost"] == 2


def test_a_pin_whose_end_had_to_go_holds_the_rest_of_its_path(world: World) -> None:
    actor = world.open()
    tokens = list(range(200))
    actor.put(tokens)
    actor.store.pin(NAMESPACE, [b.chain for b in actor.blocks(tokens[:100])], ttl_s=9.0)
    actor.store.pin(NAMESPACE, [b.chain for b in actor.blocks(tokens)])
    actor = world.reopen(room(700_000))
    left = actor.get(tokens)
    (pin,) = actor.store.core.pins
    assert 0 < left < 100 and pin.chain == actor.blocks(tokens[:left])[-1].chain and pin.expires is None
    assert len(world.reopen(room(700_000)).store.core.pins) == 1


def test_a_pin_without_its_block_is_not_counted_as_one(actor: Actor) -> None:
    actor.put(PROMPT)
    chain = actor.blocks(PROMPT)[-1].chain
    actor.store.pin(NAMESPACE, [chain])
    os.unlink(actor.store.core.tree.shard(NAMESPACE, chain))
    actor.store.quarantine(NAMESPACE, chain, "vanished")
    assert (actor.store.stats()["pins"], actor.store.stats()["pins_waiting"]) == (0, 1)
    actor.put(PROMPT)
    assert (actor.store.stats()["pins"], actor.store.stats()["pins_waiting"]) == (1, 0)


def shards(world: World) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(world.folder, "blocks").rglob("*.*")}


def test_a_limit_of_0_switches_the_store_off_and_leaves_what_is_there(world: World) -> None:
    actor = world.open()
    actor.put(PROMPT)
    before = shards(world)
    actor.store.departed()
    actor.store.set_limits(Limits(0))
    assert actor.store.departed() == (EVERYTHING,)
    for start in (False, True):
        off = world.reopen(0, free_space=1 << 60) if start else actor
        off.reasons.clear()
        store = off.store
        assert (off.get(PROMPT), off.put([70, 71])) == (0, 0) and off.reasons == ["off"]
        while store.tend():
            pass
        found = store.stats()
        assert found["off"] and found["blocks"] == 3 and found["shards_bytes"] > 0
        assert shards(world) == before
    off.store.set_limits(Limits(8_000_000))
    assert off.get(PROMPT) == len(PROMPT) and not off.store.stats()["off"]


def test_a_start_with_limit_0_leaves_foreign_files_and_orphans_alone_too(world: World) -> None:
    actor = world.open()
    place = reserve(actor, [1, 2])
    assert isinstance(place, Reservation)
    write(actor, place, [1, 2])
    crash(actor.store)
    world.stores.clear()
    Path(world.folder, "blocks", "x.bin").write_bytes(bytes(100))
    before = shards(world)
    store = world.open(0).store
    store.tend()
    assert shards(world) == before and len(before) == 2


def test_what_a_store_that_is_off_still_holds_can_be_cleared(world: World) -> None:
    world.open().put(PROMPT)
    off = world.reopen(0)
    assert finish(clear(off.store.core)).checked == 3
    assert shards(world) == {} and off.store.stats()["shards_bytes"] == 0


def test_a_pin_holds_the_path_to_the_root_until_it_expires(world: World) -> None:
    actor = world.open(room(900_000))
    actor.put(PROMPT)
    world.now += 10
    actor.store.pin(NAMESPACE, [b.chain for b in actor.blocks(PROMPT)], ttl_s=100)
    for n in range(60):
        world.now += 1
        actor.put([n + 100, 1])
    assert actor.get(PROMPT, touch=False) == len(PROMPT)
    world.now += 100
    actor.store.tend()
    assert actor.store.stats()["counters"]["pins_expired"] == 1
    for n in range(60):
        world.now += 1
        actor.put([n + 300, 1])
    assert actor.get(PROMPT) == 0


def test_nothing_stored_cannot_be_pinned(actor: Actor) -> None:
    with pytest.raises(StoreError, match="nothing to pin"):
        actor.store.pin(NAMESPACE, [bytes(16)])


def test_a_scan_does_not_push_out_what_is_in_use(world: World) -> None:
    actor = world.open(room(900_000))
    actor.put(PROMPT)
    world.now += 1
    actor.get(PROMPT)
    for n in range(100):
        world.now += 1
        actor.put([n + 100, 1, 2, 3])
    assert actor.get(PROMPT) == len(PROMPT)
    assert actor.store.stats()["counters"]["evicted.full"] > 20


def test_last_uses_and_hits_survive_a_restart(world: World) -> None:
    actor = world.open()
    actor.put([1, 2])
    world.now += 7200
    actor.get([1, 2])
    path = actor.store.core.tree.shard(NAMESPACE, actor.blocks([1, 2])[0].chain)
    (slot,) = world.reopen().store.core.table
    assert slot.hits == 1 and slot.used == world.now == os.stat(path).st_mtime


def test_foreign_and_old_files_are_counted_and_collected_when_room_is_needed(world: World) -> None:
    actor = world.open()
    actor.put(PROMPT)
    root = Path(world.folder)
    old = root / "blocks" / NAMESPACE.hex() / ("ab" * 16 + ".safetensors")
    world.stores[-1].close()
    (root / "blocks" / "x.bin").write_bytes(bytes(100_000))
    text = b'{"__metadata__":{"format":"v0","self":""}}'
    old.write_bytes(len(text).to_bytes(8, "little") + text)
    again = world.open()
    again.store.tend()
    stats = again.store.stats()
    assert stats["foreign_files"] == 2 and stats["foreign_bytes"] >= 100_000 and stats["counters"]["old_format"] == 1
    smaller = world.reopen(room(740_000))
    assert not (root / "blocks" / "x.bin").exists() and smaller.get(PROMPT) == len(PROMPT)
    finish(gc(smaller.store.core))
    assert not old.exists() and smaller.get(PROMPT) == len(PROMPT)


def test_bytes_written_are_counted_by_day_and_in_total(world: World) -> None:
    actor = world.open(tbw=10**9)
    actor.put(PROMPT)
    first = actor.store.stats()
    size = sum(s.size for s in actor.store.core.table)
    assert first["written_today_bytes"] == first["written_total_bytes"] == size
    assert first["endurance_per_year"] == pytest.approx(size * 365.25 / 10**9)
    world.now += 86_400
    os.unlink(os.path.join(world.folder, "index/data.mdb"))
    later = world.reopen(tbw=10**9).store.stats()
    assert later["written_today_bytes"] == 0 and later["written_total_bytes"] == size


def test_pinned_blocks_stay_when_a_start_finds_leftovers_beside_a_full_store(world: World) -> None:
    """What a killed writer left uncommitted goes before a pin does."""
    actor = world.open(room(900_000))
    pinned = [[100 * n + i for i in range(8)] for n in range(1, 7)]
    for tokens in pinned:
        assert actor.put(tokens) == 8
        actor.store.pin(NAMESPACE, [b.chain for b in actor.blocks(tokens)])
    places = []
    while isinstance(place := reserve(actor, [5, len(places)]), Reservation):
        write(actor, place, [5, len(places)])
        places.append(place)
    assert places and place.reason == "full"
    crash(actor.store)
    world.stores.clear()
    for n in range(16):
        block = actor.blocks([6, n])[0]
        store_shard(actor.files, world.folder + "/tmp/x", actor.store._core.tree.shard(NAMESPACE, block.chain), block,
                    payload(block))  # fmt: skip
    again = world.open(room(900_000))
    assert [again.get(tokens) for tokens in pinned] == [8] * len(pinned)
    assert du(world.folder) <= room(900_000)


def test_no_block_is_stored_at_the_cost_of_the_one_it_follows(world: World) -> None:
    """The parent is the only block that may go: then its child is refused, instead of being stored out of reach."""
    actor = world.open(room(900_000))
    number = 0
    while actor.put([number, 1, 2]) == 3:
        actor.store.pin(NAMESPACE, [b.chain for b in actor.blocks([number, 1, 2])])
        number += 1
    actor.store.unpin(actor.blocks([0, 1, 2])[0].chain)
    assert actor.put([50, 1, 2, 3, 4]) == BLOCK == actor.get([50, 1, 2, 3, 4])
    assert actor.reasons[-1] == "full" and not actor.store.core.table.strays()


def test_a_block_whose_parent_is_not_stored_is_refused(actor: Actor) -> None:
    assert reserve(actor, PROMPT, 1) == Refusal("parent_missing")
    assert isinstance(reserve(actor, PROMPT, 0), Reservation) and isinstance(reserve(actor, PROMPT, 1), Reservation)
