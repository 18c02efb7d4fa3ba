"""verify, gc, clear, rebuild and the verbs that people call."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvclient.errors import BadRequest, StoreError
from kvd.store.adopt import adopt, reset_index
from kvd.store.base import Offer
from kvd.store.upkeep import clear, gc, rebuild, verify
from kvd.store.verbs import VERBS, advance, perform, steps
from tests.store.conftest import World, finish
from torments.actor import Actor
from torments.blocks import NAMESPACE
from torments.oracle import Outcome, leftovers

PROMPT = list(range(1, 11))
BRANCH = [*PROMPT[:4], 50, 51]


@pytest.fixture
def full(actor: Actor) -> Actor:
    actor.put(PROMPT)
    actor.put(BRANCH)
    return actor


def shard(actor: Actor, tokens: list[int], index: int) -> Path:
    return Path(actor.store.core.tree.shard(NAMESPACE, actor.blocks(tokens)[index].chain))


def test_verify_sets_damaged_blocks_aside_and_says_how_many(full: Actor) -> None:
    path = shard(full, PROMPT, 1)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    shard(full, BRANCH, 1).unlink()
    report = perform(full.store, "verify", {})
    assert report["checked"] == 4 and report["damaged"] == 2
    assert report["counts"] == {"ok": 2, "checksum": 1, "vanished": 1}
    assert full.get(PROMPT) == 4 and perform(full.store, "verify", {})["damaged"] == 0
    assert full.store.stats()["quarantined_files"] == 1


def test_gc_collects_what_no_lookup_can_reach(full: Actor) -> None:
    full.store.quarantine(NAMESPACE, full.blocks(PROMPT)[1].chain, "checksum")
    report = finish(gc(full.store.core))
    assert report.counts == {"junk": 1, "strays": 1} and report.freed > 0
    assert full.get(PROMPT) == 4 and full.get(BRANCH) == len(BRANCH)
    (Path(full.store.core.tree.tmp) / "left").write_bytes(b"x")
    assert finish(gc(full.store.core)).counts == {"junk": 1}
    assert not os.listdir(full.store.core.tree.tmp)


def test_gc_leaves_alone_what_is_being_written(full: Actor) -> None:
    block = full.blocks([70, 71])[0]
    place = full.store.reserve(Offer(NAMESPACE, block.chain, NAMESPACE, block.tokens, 0, 9000))
    Path(place.temp).write_bytes(b"half")  # type: ignore[union-attr]
    finish(gc(full.store.core))
    assert os.path.exists(place.temp)  # type: ignore[union-attr]


def test_clear_drops_everything_or_one_models_blocks(full: Actor) -> None:
    other = Actor(full.store, namespace=b"o" * 16)
    other.put(PROMPT)
    full.store.label(b"o" * 16, "other")
    full.store.pin(NAMESPACE, [full.blocks(PROMPT)[0].chain])
    assert perform(full.store, "clear", {"model": "other"})["checked"] == 3
    assert (other.get(PROMPT), full.get(PROMPT)) == (0, len(PROMPT))
    with pytest.raises(BadRequest, match="nothing is stored"):
        perform(full.store, "clear", {"model": "nobody"})
    assert finish(clear(full.store.core)).checked == 4
    assert full.get(PROMPT) == 0 and not list(full.store.core.pins)
    assert full.put(PROMPT) == len(PROMPT)


def test_models_with_the_same_weights_share_their_blocks_and_a_clear_says_so(full: Actor) -> None:
    for name in ("two", "demo", "two"):
        full.store.label(NAMESPACE, name)
    assert {node["model"] for node in perform(full.store, "ls", {"model": "two"})["prefixes"]} == {"demo, two"}
    stats = full.store.stats()
    assert list(stats["models"]) == ["demo, two"] and stats["shared"] == [("demo", "two")]
    answer = perform(full.store, "clear", {"model": "two"})
    assert (answer["checked"], answer["shared_with"]) == (4, ["demo"])
    assert full.store.stats()["shared"] == []


def test_clearing_one_model_takes_its_damaged_and_old_files_too_and_no_others(full: Actor) -> None:
    other = Actor(full.store, namespace=b"o" * 16)
    for actor, name in ((full, "demo"), (other, "other")):
        actor.store.label(actor.namespace, name)
        actor.put([90, 91])
        path = Path(full.store.core.tree.shard(actor.namespace, actor.blocks([90, 91])[0].chain))
        os.truncate(path, 5000)
        assert actor.get([90, 91]) == 0
        path.with_name("left").write_bytes(b"x")
    root = Path(full.store.core.tree.root)
    found = lambda actor: [p for p in root.rglob("*") if actor.namespace.hex() in str(p) and p.is_file()]  # noqa: E731
    assert found(full) and found(other)
    before = found(other)
    perform(full.store, "clear", {"model": "demo"})
    assert found(full) == [] and found(other) == before


def test_a_clear_says_how_many_blocks_are_being_written_and_stay(full: Actor) -> None:
    block = full.blocks([70, 71])[0]
    full.store.reserve(Offer(NAMESPACE, block.chain, NAMESPACE, block.tokens, 0, 9000))
    assert perform(full.store, "clear", {})["counts"] == {"blocks": 4, "being_written": 1}
    full.store.label(NAMESPACE, "demo")
    assert perform(full.store, "clear", {"model": "demo"})["counts"] == {"blocks": 0, "being_written": 1}


def test_a_rebuild_gives_the_same_hits_and_pins(full: Actor) -> None:
    full.store.pin(NAMESPACE, [full.blocks(PROMPT)[-1].chain])
    assert finish(rebuild(full.store.core)).counts == {"adopted": 4}
    assert full.get(PROMPT) == len(PROMPT) and full.get([*BRANCH, 1]) == len(BRANCH)
    assert full.store.core.pins.get(full.blocks(PROMPT)[-1].chain)


def test_long_rounds_can_be_interleaved_with_other_work(full: Actor) -> None:
    work = steps(full.store, "verify", {})
    assert advance(work, 0.0) == (1, 4)
    assert full.get(PROMPT) == len(PROMPT)
    finish(clear(full.store.core))
    answer = advance(work, 10.0)
    assert isinstance(answer, dict) and answer["checked"] == 1 and answer["damaged"] == 0
    assert list(verify(full.store.core)) == []


def test_pins_are_set_and_removed_by_the_first_digits_of_a_chain(full: Actor) -> None:
    chain = full.blocks(PROMPT)[-1].chain.hex()
    assert perform(full.store, "pin", {"chain": chain[:8], "ttl_s": 60.0})["expires"]
    assert perform(full.store, "unpin", {"chain": chain[:8]}) == {"chain": chain, "unpinned": True}
    assert perform(full.store, "unpin", {"chain": chain[:8]})["unpinned"] is False
    for wrong, message in (("00", "too short"), ("zzzz", "not hexadecimal"), ("00000000", "no stored blocks")):
        with pytest.raises(BadRequest, match=message):
            perform(full.store, "pin", {"chain": wrong})


def test_every_verb_is_known_and_others_are_refused(full: Actor) -> None:
    assert set(VERBS) == {"stats", "ls", "verify", "gc", "clear", "rebuild", "export", "import", "pin", "unpin"}
    with pytest.raises(BadRequest, match="not known"):
        perform(full.store, "explode", {})


def test_an_error_of_the_disk_is_one_of_the_store(full: Actor) -> None:
    os.rename(full.store.core.tree.tmp, full.store.core.tree.tmp + "x")
    with pytest.raises(StoreError):
        perform(full.store, "gc", {})
    os.rename(full.store.core.tree.tmp + "x", full.store.core.tree.tmp)


def test_nothing_is_left_over_after_upkeep(full: Actor) -> None:
    outcome = Outcome("x")
    perform(full.store, "gc", {})
    leftovers(outcome, full.store, "gc")
    assert outcome.failures == []


def test_an_index_that_is_mostly_free_pages_shrinks(world: World) -> None:
    actor = world.open(60_000_000, durable=False)
    actor.durable = False
    for n in range(900):
        actor.put([n, 1, 2, 3])
    data = Path(actor.store.core.tree.index) / "data.mdb"
    large = data.stat().st_size
    perform(actor.store, "clear", {})
    assert data.stat().st_size < large / 4
    assert actor.put(PROMPT) == len(PROMPT) and world.reopen().get(PROMPT) == len(PROMPT)


def test_what_leaves_while_a_clear_goes_on_is_no_error_and_not_counted_twice(
    full: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.store.upkeep.STEP", 1)
    core = full.store.core
    work = clear(core)
    next(work)
    core.drop(list(core.table)[:1], "evicted.full")
    assert finish(work).checked == 3
    assert core.table.bytes == core.ledger.shards == 0
    outcome = Outcome("x")
    leftovers(outcome, full.store, "clear")
    assert outcome.failures == []


def test_a_clear_takes_what_upkeep_would_adopt_between_two_of_its_steps(
    full: Actor, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.store.upkeep.STEP", 1)
    core = full.store.core
    reset_index(core)
    adopt(core, list(core.orphans.values())[:2])
    work = clear(core)
    next(work)
    full.store.tend()
    finish(work)
    assert len(core.table) == len(core.orphans) == 0
