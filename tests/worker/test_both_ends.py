"""Where computing is about as fast as reading, a prefix is computed from its start while it is read from its end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence

import pytest

from kvd.worker import arrival, fetch
from kvd.worker.scheduler import Limits
from tests.worker.gate import Gate
from tests.worker.rig import Answer, B, Rig, counts, ids, same

CHUNK = 4 * B
FRONT = 2 * CHUNK
STORED = 14 * B + 5


@pytest.fixture
def gate() -> Gate:
    gate = Gate()
    gate.opened.set()
    return gate


@pytest.fixture(params=["in place", "staged"])
def rig(request: pytest.FixtureRequest, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    if request.param == "staged":
        monkeypatch.setattr("kvd.cache.pool.addressable", lambda: False)
    monkeypatch.setattr(arrival, "GROUP_BYTES", 1)
    monkeypatch.setattr(fetch, "meet", lambda rates, start, cuts, both: FRONT if both and start < FRONT else start)
    with Rig(files=lambda: gate, limits=Limits(chunk=CHUNK)) as rig:
        yield rig
        gate.opened.set()


def begun(rig: Rig, gate: Gate, tokens: list[int]) -> Answer:
    """After a restart: the front is computed, nothing of the rest has been read."""
    rig.restart()
    gate.opened.clear()
    running = rig.send(tokens=tokens, logprobs=True, top_logprobs=5)
    running.wait_rows(FRONT)
    assert not running.ended.is_set()
    return running


@pytest.mark.parametrize("new", [0, 20, 150])
def test_the_front_is_computed_while_the_rest_is_read(rig: Rig, gate: Gate, new: int) -> None:
    asked = ids(STORED, 1) + ids(new, 2)
    said = rig.ask(ids(STORED, 1))
    cold = rig.ask(asked, cache="off")
    running = begun(rig, gate, asked)
    gate.opened.set()
    same(cold, running.end())
    later = max(new, 1)
    assert counts(running) == (FRONT + later, 0, len(asked) - FRONT - later, 0)
    assert running.stats["miss_reason"] == "recompute_cheaper"
    assert rig.engine._computer.rows_fed == FRONT + later
    same(cold, rig.ask(asked))
    same(said, rig.ask(ids(STORED, 1)))


def test_what_was_read_before_the_front_is_computed_waits_for_it(rig: Rig, gate: Gate) -> None:
    asked = ids(STORED, 3)
    cold = rig.ask(asked)
    rig.restart()
    again = rig.ask(asked)
    assert counts(again) == (FRONT + 1, 0, len(asked) - FRONT - 1, 0)
    same(cold, again)


def test_rows_of_memory_come_before_the_front(rig: Rig, gate: Gate) -> None:
    asked = ids(STORED, 4)
    cold = rig.ask(asked)
    rig.restart()
    rig.ask(asked[: CHUNK + 3], cache="read", max_tokens=1)
    fed = rig.engine._computer.rows_fed
    again = rig.ask(asked)
    known = 4 * B
    assert counts(again) == (FRONT - known + 1, known, len(asked) - FRONT - 1, 0)
    assert rig.engine._computer.rows_fed == fed + FRONT - known + 1
    same(cold, again)


@pytest.mark.parametrize("failing", [8, 10, 14])
def test_a_block_of_the_rest_that_fails_is_a_miss_from_there_on(rig: Rig, gate: Gate, failing: int) -> None:
    asked = ids(STORED, 5) + ids(20, 6)
    rig.ask(ids(STORED, 5))
    cold = rig.ask(asked, cache="off")
    rig.restart()
    shards = sorted((rig.folder / "store").rglob("*.safetensors"))
    broken = {os.stat(rig.shard(ids(STORED, 5), failing)).st_ino} if failing < 14 else _tail(rig, shards)
    gate.fails = lambda fd: os.fstat(fd).st_ino in broken
    again = rig.ask(asked)
    assert counts(again) == (FRONT + len(asked) - failing * B, 0, failing * B - FRONT, 0)
    assert again.stats["miss_reason"] == "read_failed"
    same(cold, again)
    same(cold, rig.ask(asked))


def _tail(rig: Rig, shards: Sequence[os.PathLike[str]]) -> set[int]:
    """The shard that is no full block of the prompt."""
    full = {os.stat(rig.shard(ids(STORED, 5), at)).st_ino for at in range(14)}
    return {os.stat(shard).st_ino for shard in shards} - full


def test_a_cancel_in_the_middle_keeps_what_is_right(rig: Rig, gate: Gate) -> None:
    asked = ids(STORED, 7)
    cold = rig.ask(asked)
    running = begun(rig, gate, asked)
    rig.engine.cancel(running.id, "asked")
    assert running.end().body["choices"][0]["finish_reason"] == "cancelled"
    gate.opened.set()
    again = rig.ask(asked)
    assert counts(again)[0] == 1
    same(cold, again)


def test_the_same_prompt_asked_meanwhile_waits_and_computes_one_row(rig: Rig, gate: Gate) -> None:
    asked = ids(STORED, 8)
    cold = rig.ask(asked)
    running = begun(rig, gate, asked)
    other = rig.send(tokens=asked, logprobs=True, top_logprobs=5)
    other.wait_for("queued")
    gate.opened.set()
    assert running.end().text == cold.text == other.end().text
    assert counts(other)[0] == 1


def test_others_are_served_meanwhile(rig: Rig, gate: Gate) -> None:
    asked = ids(STORED, 9)
    cold = rig.ask(asked)
    running = begun(rig, gate, asked)
    short = rig.ask(ids(20, 11), max_tokens=100, logit_bias={2: -100})
    assert short.stats["completion_tokens"] == 100
    assert not running.ended.is_set()
    gate.opened.set()
    same(cold, running.end())


def test_beside_a_stream_all_of_a_prefix_is_read(rig: Rig) -> None:
    asked = ids(STORED, 10)
    cold = rig.ask(asked)
    rig.restart()
    stream = rig.send(tokens=ids(20, 11), max_tokens=4000, logit_bias={2: -100})
    stream.wait_for("text")
    again = rig.ask(asked)
    assert not stream.ended.is_set()
    rig.engine.cancel(stream.id, "asked")
    assert counts(again) == (1, 0, len(asked) - 1, 0)
    assert again.text == cold.text


def test_a_pool_that_is_full_keeps_what_is_being_read_into(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "meet", lambda rates, start, cuts, both: FRONT if both and start < FRONT else start)
    with Rig(files=lambda: gate, limits=Limits(chunk=CHUNK), pool_blocks=20) as rig:
        asked, other = ids(STORED, 12), ids(40, 13)
        cold, alone = rig.ask(asked), rig.ask(other, max_tokens=60, logit_bias={2: -100})
        running = begun(rig, gate, asked)
        growing = rig.send(tokens=other, max_tokens=60, logit_bias={2: -100})
        growing.wait_for("text")
        gate.opened.set()
        assert (running.end().text, growing.end().text) == (cold.text, alone.text)


def test_who_finds_no_room_beside_a_front_lets_it_be_computed(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "meet", lambda rates, start, cuts, both: FRONT if both and start < FRONT else start)
    asked, other = ids(STORED, 5), ids(7 * B + 5, 6)
    with Rig(files=lambda: gate, limits=Limits(chunk=CHUNK), pool_blocks=20) as rig:
        cold, alone = rig.ask(asked), rig.ask(other, cache="off")
        rig.restart()
        now = time.monotonic()
        rig.hold_lookups.set()
        running = rig.send(tokens=asked, logprobs=True, top_logprobs=5)
        first = rig.send(tokens=other, logprobs=True, top_logprobs=5, arrival=now - 100)
        rig.on_engine(lambda: None)
        rig.release_lookups()
        assert (running.end().text, first.end().text) == (cold.text, alone.text)
