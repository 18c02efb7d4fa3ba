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
from kvd.store.base import Offer, Refusal, Reservation
from tests.store.conftest import World, reserve, write
from torments.actor import BLOCK, Actor
from torments.blocks import NAMESPACE
from torments.oracle import crash

PROMPT = list(range(1, 11))


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
    assert actor.store.reserve(Offer(NAMESPACE, bytes(16), NAMESPACE, (1,), 0, 5000)) == Refusal("bad_request")
    chain = next_chain(NAMESPACE, [7])
    assert actor.store.reserve(Offer(NAMESPACE, chain, NAMESPACE, (7,), 0, 9_000_000)) == Refusal("larger_than_limit")
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


def test_without_durable_nothing_is_synced(world: World) -> None:
    from kvd.store.faults import Faults, FaultyFiles

    faults = Faults()
    actor = world.open(files=FaultyFiles(faults), durable=False)
    actor.durable = False
    assert actor.put(PROMPT) == len(PROMPT)
    assert world.reopen(durable=False).get(PROMPT) == len(PROMPT)
    assert not any(faults.calls[c] for c in ("fsync", "full_fsync", "full_fsync_dir"))
    assert faults.calls["fsync_dir"] <= 1


def test_a_wrong_report_of_a_vanished_shard_changes_nothing(actor: Actor) -> None:
    actor.put([1, 2])
    actor.store.quarantine(NAMESPACE, actor.blocks([1, 2])[0].chain, "vanished")
    assert actor.get([1, 2]) == 2


def test_a_reservation_says_whether_to_sync(world: World) -> None:
    place = reserve(world.open(durable=False), [1])
    assert isinstance(place, Reservation) and not place.durable


def test_only_blocks_that_follow_each_other_are_hits(actor: Actor) -> None:
    actor.put(PROMPT)
    chains = actor.full_chains(PROMPT)
    assert actor.store.lookup(NAMESPACE, chains[1:], NAMESPACE, PROMPT[BLOCK:]).hits == ()
    assert len(actor.store.lookup(NAMESPACE, chains[1:], chains[0], PROMPT[BLOCK:]).hits) == 1


def test_a_commit_syncs_each_folder_once_and_the_list_of_folders_when_it_changed(world: World) -> None:
    from kvd.store.faults import Faults, FaultyFiles

    faults = Faults()
    actor = world.open(files=FaultyFiles(faults))
    actor.put([1])
    before = faults.calls["fsync_dir"], faults.calls["full_fsync_dir"]
    actor.put([2, 3])
    assert (faults.calls["fsync_dir"], faults.calls["full_fsync_dir"]) == (before[0], before[1] + 1)
    Actor(actor.store, actor.files, namespace=b"n" * 16).put([2, 3])
    assert (faults.calls["fsync_dir"], faults.calls["full_fsync_dir"]) == (before[0] + 1, before[1] + 2)
