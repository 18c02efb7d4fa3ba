"""Writing in the background: failures cost a block its place on disk, never an answer."""

from __future__ import annotations

import errno
import threading

import pytest

from kvd.store.base import Limits as StoreLimits
from kvd.store.faults import Faults, FaultyFiles
from kvd.store.files import RealFiles
from kvd.store.verbs import perform
from kvd.worker import finish
from kvd.worker.spill import State
from tests.worker.rig import PATIENCE, B, Rig, ids, until


@pytest.mark.parametrize("call", ["create", "pwritev", "fsync", "rename"])
@pytest.mark.parametrize(("error", "reason"), [("ENOSPC", "no_space"), ("EIO", "write_failed")])
def test_a_failed_write_is_counted_and_tried_again_at_the_next_use(call: str, error: str, reason: str) -> None:
    faults = Faults(call, 2, error, forever=True)
    prompt = ids(4 * B, 1)
    with Rig(files=lambda: FaultyFiles(faults)) as rig:
        first = rig.ask(prompt)
        assert rig.engine.spill.counters[reason] == faults.fired > 0
        assert first.stats["stored_tokens"] == B
        faults.call = ""
        again = rig.ask(prompt)
        assert again.stats["computed_tokens"] == 1
        assert again.stats["stored_tokens"] >= len(prompt)
        assert again.logprobs == first.logprobs


@pytest.mark.parametrize("call", ["open", "preadv", "stat"])
@pytest.mark.parametrize("error", ["EIO", "EMFILE"])
def test_a_failed_read_is_a_miss_from_there_on(call: str, error: str) -> None:
    faults = Faults()
    prompt = ids(4 * B, 2)
    with Rig(files=lambda: FaultyFiles(faults)) as rig:
        cold = rig.ask(prompt)
        rig.restart()
        faults.call, faults.nth, faults.error = call, faults.calls[call] + 1, error
        again = rig.ask(prompt)
        assert faults.fired == 1
        stats = again.stats
        assert 1 < stats["computed_tokens"] <= len(prompt)
        assert stats["cached_tokens"] + stats["computed_tokens"] == len(prompt)
        assert stats["miss_reason"] in ("read_failed", "truncated")
        assert again.logprobs == cold.logprobs
        assert rig.ask(prompt).logprobs == cold.logprobs


def test_a_disk_that_takes_nothing_delays_no_answer_and_blocks_are_dropped_with_a_reason() -> None:
    with Rig() as rig:
        rig.hold_writes.set()
        block = rig.cache.layout.bytes_per_token() * B
        rig.engine.spill._max_pending = 6 * block
        for seed in range(6):
            answer = rig.ask(ids(4 * B, seed), durable_wait_ms=0)
            assert answer.kind == "done"
        assert rig.engine.spill.pending_bytes <= 6 * block
        assert rig.engine.spill.counters["slow_disk"] > 0
        rig.release_writes()


def test_while_a_write_hangs_a_clear_says_of_every_block_on_its_way_that_it_stays() -> None:
    hung, done = threading.Event(), threading.Event()

    class Hanging(RealFiles):
        def fsync(self, fd: int) -> None:
            hung.set()
            assert done.wait(PATIENCE)
            super().fsync(fd)

        full_fsync = fsync

    with Rig(files=Hanging) as rig:
        rig.ask(ids(4 * B, 1), max_tokens=1, durable_wait_ms=0)
        assert hung.wait(PATIENCE)
        until(lambda: rig.on_store(lambda: len(rig.store.core.pending)) == 4)
        assert rig.on_store(lambda: perform(rig.store, "clear", {}))["counts"]["being_written"] == 4
        done.set()
        until(lambda: rig.on_store(lambda: rig.store.stats()["blocks"]) == 4)


def test_pinned_blocks_do_not_fail_a_request_that_needs_room() -> None:
    """The pool is full of blocks that the disk has not taken yet: the next prompt waits for it."""
    with Rig(pool_blocks=8) as rig:
        rig.hold_writes.set()
        rig.ask(ids(6 * B, 1), durable_wait_ms=0)
        waiting = rig.send(tokens=ids(6 * B, 2), durable_wait_ms=0)
        rig.release_writes()
        assert waiting.end().stats["computed_tokens"] == 6 * B


def test_only_a_commit_makes_a_block_durable() -> None:
    with Rig() as rig:
        rig.hold_writes.set()
        rig.ask(ids(2 * B, 1), durable_wait_ms=0)
        chains = [bytes(entry.chain) for entry in rig.on_engine(lambda: rig.cache.match(ids(2 * B, 1))).blocks]
        assert [rig.engine.spill.state(chain) for chain in chains] == [State.PENDING] * 2
        rig.release_writes()
        assert rig.ask(ids(2 * B, 1)).stats["stored_tokens"] >= 2 * B
        assert [rig.engine.spill.state(chain) for chain in chains] == [State.DURABLE] * 2


def test_a_prefix_that_is_written_at_its_second_use_is_not_written_at_the_end_of_its_first() -> None:
    prompt = ids(4 * B + 5, 1)
    with Rig() as rig:
        rig.on_store(lambda: rig.store.set_limits(StoreLimits(1 << 30, admission="second")))
        assert rig.ask(prompt, max_tokens=2 * B).stats["stored_tokens"] == 0
        assert rig.on_store(lambda: rig.store.stats())["blocks"] == 0
        assert rig.ask(prompt, max_tokens=2 * B).stats["stored_tokens"] >= len(prompt)


def test_a_block_that_a_device_does_not_give_out_is_dropped_and_counted() -> None:
    def fails(published: object) -> None:
        raise OSError(errno.EIO, "cuMemHostAlloc: 2")

    with Rig() as rig:
        rig.on_engine(lambda: setattr(rig.cache, "host_rows", fails))
        answer = rig.ask(ids(2 * B + 5, 1), durable_wait_ms=0)
        assert answer.stats["stored_tokens"] == 0
        assert rig.engine.spill.counters["copy_failed"] >= 3 and not rig.engine.spill.pending_bytes


def test_a_block_that_cannot_be_put_into_words_costs_no_other_its_place() -> None:
    threads = set()

    def words(tokenizer: object, tokens: list[int]) -> str:
        threads.add(threading.current_thread().name)
        if tokens[0] == ids(B, 1)[0]:
            raise RuntimeError("a tokenizer's bug")
        return "words"

    with Rig() as rig, pytest.MonkeyPatch.context() as patch:
        patch.setattr(finish, "line", words)
        assert rig.ask(ids(2 * B + 5, 1)).stats["stored_tokens"] == 0
        assert rig.engine.spill.counters["write_failed"] in (1, 2), "offered again at the end, if it is told by then"
        assert not rig.engine.spill.pending_bytes
        assert rig.ask(ids(2 * B + 5, 2)).stats["stored_tokens"] >= 2 * B + 5
    assert threads == {"spill-ask"}, "the engine has no time for it, and the other one may hang in a write"


def test_what_was_read_counts_as_used_in_the_store() -> None:
    prompt = ids(3 * B, 1)
    with Rig() as rig:
        rig.ask(prompt)
        rig.restart()
        assert rig.ask(prompt, cache="read", max_tokens=1).stats["cached_ssd_tokens"] == 3 * B - 1
        assert rig.on_store(lambda: [slot.hits for slot in rig.store.core.table if slot.tokens == B]) == [1, 1, 1]
