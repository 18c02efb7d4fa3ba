"""What the owner promises to the front and the workers."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvclient.errors import StoreError
from kvd.cache.chain import next_chain
from kvd.store.base import Limits, Refusal, Reservation, Written
from kvd.store.shard import file_bytes, store_shard
from kvd.store.upkeep import finish, gc
from tests.store.conftest import World
from torments.actor import BLOCK, Actor
from torments.blocks import NAMESPACE, payload
from torments.oracle import crash, du

PROMPT = list(range(1, 11))


def reserve(actor: Actor, tokens: list[int], index: int = -1) -> Reservation | Refusal:
    block = actor.blocks(tokens)[index]
    return actor.store.reserve(
        block.namespace, block.chain, block.parent, block.tokens, block.start, file_bytes(block), block.preview
    )


def write(actor: Actor, place: Reservation, tokens: list[int], index: int = -1) -> Written:
    block = actor.blocks(tokens)[index]
    size, checksum = store_shard(actor.files, place.temp, place.final, block, payload(block))
    return Written(place.id, checksum, size)


def test_a_stored_prompt_is_found_to_the_last_token(actor: Actor) -> None:
    for tokens in ([1], PROMPT[:BLOCK], PROMPT[: BLOCK + 1], PROMPT):
        assert actor.put(tokens) == len(tokens) == actor.get(tokens)


def test_a_divergence_inside_a_block_is_found_to_the_token(actor: Actor) -> None:
    actor.put(PROMPT)
    for same in range(len(PROMPT)):
        assert actor.get([*PROMPT[:same], 99, 98, 97]) == same


def test_everything_is_found_after_a_restart_and_after_a_kill(world: World) -> None:
    world.open().put(PROMPT)
    again = world.reopen()
    assert again.get(PROMPT) == len(PROMPT)
    crash(again.store)
    assert world.open().get(PROMPT) == len(PROMPT)
    world.stores.remove(again.store)


def test_a_start_opens_no_shard(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.open().put(PROMPT)
    opened = []
    from kvd.store.files import RealFiles

    class Noting(RealFiles):
        def open(self, path: str) -> int:
            opened.append(path)
            return super().open(path)

    world.stores[-1].close()
    assert world.open(files=Noting()).store.lookup(NAMESPACE, [], NAMESPACE, PROMPT).child
    assert not [path for path in opened if path.endswith(".safetensors")]


def test_a_block_counts_only_once_it_is_committed(actor: Actor) -> None:
    place = reserve(actor, [1, 2])
    assert isinstance(place, Reservation) and actor.get([1, 2]) == 0
    written = write(actor, place, [1, 2])
    assert actor.get([1, 2]) == 0
    assert [item.ok for item in actor.store.commit([written])] == [True]
    assert actor.get([1, 2]) == 2


def test_what_cannot_be_reserved_says_why(actor: Actor) -> None:
    actor.put(PROMPT)
    assert reserve(actor, PROMPT, 0) == Refusal("exists")
    assert reserve(actor, PROMPT[:9]) == Refusal("covered")
    assert isinstance(reserve(actor, [50, 51]), Reservation)
    assert reserve(actor, [50, 51]) == Refusal("pending")
    assert actor.store.reserve(NAMESPACE, bytes(16), NAMESPACE, [1], 0, 5000) == Refusal("bad_request")
    chain = next_chain(NAMESPACE, [7])
    assert actor.store.reserve(NAMESPACE, chain, NAMESPACE, [7], 0, 9_000_000) == Refusal("larger_than_limit")
    counters = actor.store.stats()["counters"]
    assert all(counters[f"refused.{r}"] for r in ("exists", "covered", "pending", "bad_request", "larger_than_limit"))


def test_only_exists_and_covered_mean_stored() -> None:
    assert [r for r in ("exists", "covered", "full", "first_use") if Refusal(r).stored] == ["exists", "covered"]


def test_an_abandoned_reservation_leaves_nothing(actor: Actor) -> None:
    for renamed in (False, True):
        place = reserve(actor, [1, 2])
        assert isinstance(place, Reservation)
        if renamed:
            write(actor, place, [1, 2])
        else:
            Path(place.temp).write_bytes(b"half")
        actor.store.abandon(place.id, "worker_lost")
        assert not os.path.exists(place.temp) and not os.path.exists(place.final)
    assert actor.store.core.ledger.reserved == 0 and actor.put([1, 2]) == 2


def test_a_file_that_is_not_what_was_reported_is_not_committed(actor: Actor) -> None:
    place = reserve(actor, [1, 2])
    assert isinstance(place, Reservation)
    written = write(actor, place, [1, 2])
    os.truncate(place.final, 100)
    assert [i.reason for i in actor.store.commit([written])] == ["size_mismatch"]
    assert not os.path.exists(place.final) and actor.get([1, 2]) == 0
    assert [i.reason for i in actor.store.commit([written])] == ["unknown_reservation"]


def test_a_longer_tail_supersedes_the_one_it_contains_and_takes_its_pin(actor: Actor) -> None:
    actor.put([1, 2])
    actor.store.pin(NAMESPACE, [b.chain for b in actor.blocks([1, 2])])
    actor.put([1, 9])
    actor.put([1, 2, 3])
    core = actor.store.core
    assert sorted(s.tokens for s in core.table) == [2, 3]
    assert [p.chain for p in core.pins] == [next_chain(NAMESPACE, [1, 2, 3])]


def test_twins_with_other_namespaces_share_nothing(actor: Actor) -> None:
    actor.put(PROMPT)
    twin = Actor(actor.store, namespace=b"t" * 16)
    assert twin.get(PROMPT) == 0
    assert twin.put(PROMPT) == len(PROMPT) == twin.get(PROMPT) == actor.get(PROMPT)


def test_the_first_use_is_only_noted_if_the_second_is_to_be_written(world: World) -> None:
    actor = world.open(admission="second")
    assert actor.put([1, 2]) == 0 and actor.reasons == ["first_use"]
    assert actor.put([1, 2]) == 2


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


def test_a_lowered_limit_holds_at_once_even_against_pins(actor: Actor) -> None:
    for n in range(30):
        actor.put([n, 1, 2, 3, 4])
    actor.store.pin(NAMESPACE, [b.chain for b in actor.blocks([0, 1, 2, 3, 4])])
    actor.store.set_limits(Limits(650_000))
    assert du(actor.store.core.tree.root) <= 650_000
    actor.store.set_limits(Limits(0))
    assert len(actor.store.core.table) == 0
    assert actor.put(PROMPT) == 0


def test_a_pin_holds_the_path_to_the_root_until_it_expires(world: World) -> None:
    actor = world.open(900_000)
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
    actor = world.open(900_000)
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


def test_a_second_owner_refuses_with_the_pid_of_the_first(actor: Actor) -> None:
    script = f"from kvd.store.store import Store, Limits\nStore.open({actor.store.core.tree.root!r}, Limits(10**7))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert f"in use by process {os.getpid()}" in done.stderr.splitlines()[-1]


def test_an_owner_that_cannot_open_lets_go_of_the_lock(world: World) -> None:
    os.makedirs(world.folder)
    Path(world.folder, "blocks").write_text("a file")
    with pytest.raises(StoreError):
        world.open()
    os.unlink(Path(world.folder, "blocks"))
    assert world.open().put([1]) == 1


def test_only_the_thread_that_opened_the_store_may_use_it(actor: Actor) -> None:
    caught: list[BaseException] = []

    def use() -> None:
        try:
            actor.store.stats()
        except AssertionError as problem:
            caught.append(problem)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert caught


def test_files_and_folders_are_private_and_marked_as_a_cache(actor: Actor) -> None:
    actor.put(PROMPT)
    root = Path(actor.store.core.tree.root)
    for path in [root, *root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert (root / "CACHEDIR.TAG").read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55")
    assert (root / ".metadata_never_index").exists()


def test_a_shard_written_but_not_committed_by_a_killed_owner_is_adopted(world: World) -> None:
    actor = world.open()
    place = reserve(actor, [1, 2])
    assert isinstance(place, Reservation)
    write(actor, place, [1, 2])
    crash(actor.store)
    world.stores.clear()
    again = world.open()
    assert again.store.stats()["orphans"] == 1
    assert reserve(again, [1, 2]) == Refusal("exists")
    assert again.get([1, 2]) == 2


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
    smaller = world.reopen(740_000)
    assert not (root / "blocks" / "x.bin").exists() and smaller.get(PROMPT) == len(PROMPT)
    finish(gc(smaller.store.core))
    assert not old.exists() and smaller.get(PROMPT) == len(PROMPT)


def test_without_durable_nothing_is_synced(world: World) -> None:
    from kvd.store.faults import Faults, FaultyFiles

    faults = Faults()
    actor = world.open(files=FaultyFiles(faults), durable=False)
    actor.durable = False
    assert actor.put(PROMPT) == len(PROMPT)
    assert world.reopen(durable=False).get(PROMPT) == len(PROMPT)
    assert not any(faults.calls[c] for c in ("fsync", "full_fsync", "full_fsync_dir"))
    assert faults.calls["fsync_dir"] <= 1


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


def test_a_wrong_report_of_a_vanished_shard_changes_nothing(actor: Actor) -> None:
    actor.put([1, 2])
    actor.store.quarantine(NAMESPACE, actor.blocks([1, 2])[0].chain, "vanished")
    assert actor.get([1, 2]) == 2


def test_a_reservation_says_whether_to_sync(world: World) -> None:
    place = reserve(world.open(durable=False), [1])
    assert isinstance(place, Reservation) and not place.durable


def test_pinned_blocks_stay_when_a_start_finds_leftovers_beside_a_full_store(world: World) -> None:
    """What a killed writer left uncommitted goes before a pin does."""
    actor = world.open(900_000)
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
    again = world.open(900_000)
    assert [again.get(tokens) for tokens in pinned] == [8] * len(pinned)
    assert du(world.folder) <= 900_000
