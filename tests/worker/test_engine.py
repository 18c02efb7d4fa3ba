"""The engine over a tiny model and a real store: what is computed, what is kept, and that hits equal recomputation.

The plain mlx wheel multiplies with the reference BLAS, so equal means bit-equal here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvclient.errors import BadRequest, ContextLengthExceeded, Internal, OutOfMemory, Timeout
from kvd.worker.scheduler import Limits
from tests.worker.rig import Answer, B, Rig, ids, rows_seen, same


@pytest.fixture(scope="module")
def shared() -> Iterator[Rig]:
    with Rig() as rig:
        yield rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as rig:
        yield rig


def counts(answer: Answer) -> tuple[int, int, int]:
    """(computed, from memory, from SSD)"""
    stats = answer.stats
    assert stats["cached_tokens"] + stats["computed_tokens"] == stats["prompt_tokens"]
    assert stats["cached_memory_tokens"] + stats["cached_ssd_tokens"] == stats["cached_tokens"]
    return stats["computed_tokens"], stats["cached_memory_tokens"], stats["cached_ssd_tokens"]


@pytest.mark.parametrize("length", [1, 2, B - 1, B, B + 1, 3 * B, 3 * B + 7, 5 * B + 1])
def test_a_repeat_computes_one_row_and_equals_the_cold_answer(shared: Rig, length: int) -> None:
    prompt = ids(length, 100 + length)
    cold, warm = shared.ask(prompt), shared.ask(prompt)
    assert counts(cold) == (length, 0, 0)
    assert counts(warm) == (1, length - 1, 0)
    same(cold, warm)


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 3 * B + 7])
def test_after_a_restart_one_row_is_computed_and_equals_the_cold_answer(rig: Rig, length: int) -> None:
    prompt = ids(length, 7)
    cold = rig.ask(prompt)
    assert cold.stats["stored_tokens"] == length + 3
    rig.restart()
    again = rig.ask(prompt)
    assert counts(again) == (1, 0, length - 1)
    same(cold, again)


@pytest.mark.parametrize("at", [1, B - 1, B, B + 1, 2 * B + 5])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_diverging_prompt_computes_only_what_is_new(rig: Rig, at: int, restarted: bool) -> None:
    prompt = ids(3 * B, 1)
    rig.ask(prompt)
    if restarted:
        rig.restart()
    other = prompt[:at] + ids(20, 2)
    warm = rig.ask(other)
    assert counts(warm)[0] == 20
    assert warm.stats["first_divergence"]["token"] == at
    cold = rig.ask(other, cache="off")
    assert counts(cold) == (at + 20, 0, 0)
    same(cold, warm)


def test_conversations_that_alternate_compute_only_their_own_suffix(shared: Rig) -> None:
    trunk = ids(3 * B + 3, 40)
    branches = [trunk + ids(9, 41 + n) for n in range(3)]
    shared.ask(trunk)
    assert [counts(shared.ask(branch))[0] for branch in branches] == [9, 9, 9]
    for _ in range(2):
        assert [counts(shared.ask(branch))[0] for branch in branches] == [1, 1, 1]


def test_the_next_turn_computes_only_its_new_tokens(shared: Rig) -> None:
    prompt = ids(2 * B + 5, 50)
    first = shared.send(tokens=prompt, max_tokens=20).end()
    said = [*prompt, *shared.prompter.prepare("count", {"prompt": first.text}).tokens]
    known = shared.on_engine(lambda: shared.cache.match(said).rows)
    following = shared.ask(said + ids(11, 51))
    assert counts(following)[0] == len(said) - known + 11
    assert known >= len(prompt)


def test_resending_at_once_hits_every_time(shared: Rig) -> None:
    prompt = ids(B + 9, 60)
    shared.ask(prompt, durable_wait_ms=0)
    for _ in range(100):
        assert counts(shared.ask(prompt, max_tokens=1, durable_wait_ms=0))[0] == 1


@pytest.mark.parametrize("length", [2 * B + 20, 3 * B - 2])
def test_what_the_store_has_dropped_is_not_called_stored_but_stored_again(rig: Rig, length: int) -> None:
    prompt = ids(length, 61)
    assert rig.ask(prompt).stats["stored_tokens"] == length + 3
    rig.clear_store()
    assert rig.ask(prompt).stats["stored_tokens"] == length + 3  # memory still had it
    rig.restart()
    assert rig.ask(prompt).stats["cached_ssd_tokens"] == length - 1


def test_reads_are_right_while_the_writer_is_held(rig: Rig) -> None:
    prompt = ids(3 * B + 2, 3)
    rig.hold_writes.set()
    cold = rig.ask(prompt, durable_wait_ms=0)
    assert cold.stats["stored_tokens"] < len(prompt)
    warm = rig.ask(prompt, durable_wait_ms=0)
    assert counts(warm)[0] == 1
    same(cold, warm)
    rig.release_writes()


def test_computed_tokens_are_the_rows_fed_to_the_model(rig: Rig) -> None:
    fed = rig.on_engine(lambda: rows_seen(rig))
    total = 0
    for prompt in (ids(5 * B + 3, 1), ids(5 * B + 3, 1), ids(3 * B, 1) + ids(B, 2), ids(2, 5)):
        answer = rig.ask(prompt, max_tokens=3)
        total += answer.stats["computed_tokens"] + answer.stats["completion_tokens"] - 1
        assert sum(fed) == total


def test_a_failure_inside_a_chunk_ends_one_request_and_its_retry_equals_cold(rig: Rig) -> None:
    prompt = ids(200, 9)
    cold = rig.ask(prompt, cache="off")
    calls = rig.on_engine(lambda: _failing_at(rig, 3))
    failed = rig.ask(prompt)
    assert isinstance(failed.problem(), Internal)
    assert calls == [1, 2, 3]
    retry = rig.ask(prompt)
    assert counts(retry) == (200 - 128, 128, 0)
    same(cold, retry)


def _failing_at(rig: Rig, nth: int) -> list[int]:
    """The nth call of the model computes half its layers and raises."""
    computer = rig.engine._computer
    model, calls = computer._model, list[int]()

    def faulty(tokens: Any, cache: Any) -> Any:
        calls.append(len(calls) + 1)
        if calls[-1] == nth:
            computer._model = model
            model.model.layers[0](model.model.embed_tokens(tokens), None, cache[0])
            raise RuntimeError("device lost")
        return model(tokens, cache=cache)

    computer._model = faulty
    return calls


def test_a_cancelled_prefill_resumes_where_it_stopped(rig: Rig) -> None:
    prompt = ids(3000, 11)
    cold = rig.ask(prompt, cache="off")
    running = rig.send(tokens=prompt)
    running.wait_rows(64)
    rig.engine.cancel(running.id, "asked")
    body = running.end().body
    assert body["choices"][0]["finish_reason"] == "cancelled"
    done = running.stats["computed_tokens"]
    again = rig.ask(prompt)
    assert counts(again)[0] == len(prompt) - done
    same(cold, again)


def test_timeouts_shorter_than_the_prefill_still_get_there(rig: Rig) -> None:
    prompt = ids(3000, 12)
    for _attempt in range(200):
        answer = rig.send(tokens=prompt, timeout=0.05).end()
        if answer.kind == "done":
            break
        problem = answer.problem()
        assert isinstance(problem, Timeout)
        assert problem.details["limit_s"] == 0.05
    assert answer.kind == "done"
    assert answer.stats["computed_tokens"] < len(prompt)


def test_a_cancelled_prefill_is_kept_over_a_restart(rig: Rig) -> None:
    prompt = ids(3000, 13)
    running = rig.send(tokens=prompt)
    running.wait_rows(64)
    rig.engine.cancel(running.id, "asked")
    done = running.end().stats["computed_tokens"]
    rig.restart()
    assert counts(rig.ask(prompt)) == (len(prompt) - done, 0, done)


def test_prompts_at_below_and_over_the_context_limit() -> None:
    with Rig(model={"context": 128}) as rig:
        below = rig.send(tokens=ids(127, 1), max_tokens=50, logit_bias={2: -100}).end()
        assert (below.stats["completion_tokens"], below.body["choices"][0]["finish_reason"]) == (2, "length")
        at = rig.send(tokens=ids(128, 1), max_tokens=50, logit_bias={2: -100}).end()
        assert (at.stats["completion_tokens"], at.body["choices"][0]["finish_reason"]) == (1, "length")
        problem = rig.send(tokens=ids(129, 1)).end().problem()
        assert isinstance(problem, ContextLengthExceeded)
        assert problem.details == {"prompt": 129, "limit": 128, "reusable_prefix": 128}
        assert "shorten it, or ask a model with a longer context" in problem.message
        limits = [rig.send("explain", tokens=ids(n, 1)).end().body["limit"] for n in (128, 129)]
        assert limits == [None, 128]


def test_a_prompt_larger_than_the_pool_is_refused_with_both_numbers() -> None:
    with Rig(pool_blocks=4) as rig:
        problem = rig.send(tokens=ids(5 * B, 1)).end().problem()
        assert isinstance(problem, OutOfMemory)
        assert problem.details["needed"] == 5 * problem.details["available"] // 4
        assert problem.exit_code == BadRequest.exit_code, "it never fits: nobody shall ask again"
        assert counts(rig.ask(ids(3 * B, 1), max_tokens=2))[0] == 3 * B


def test_recycled_blocks_never_give_another_prompts_rows() -> None:
    with Rig(pool_blocks=4) as rig:
        first = ids(2 * B, 1)
        cold = rig.ask(first, cache="off")
        rig.ask(first)
        for seed in range(2, 6):
            rig.ask(ids(3 * B, seed))
        same(cold, rig.ask(first))


def test_salts_share_nothing_and_off_leaves_no_trace(rig: Rig) -> None:
    prompt = ids(2 * B + 4, 20)
    rig.ask(prompt, salt="a")
    assert counts(rig.ask(prompt, salt="b"))[0] == len(prompt)
    assert counts(rig.ask(prompt, salt="a"))[0] == 1
    assert counts(rig.ask(prompt, cache="off"))[0] == len(prompt)
    assert counts(rig.ask(prompt))[0] == len(prompt)


def test_read_only_requests_write_nothing_to_disk(rig: Rig) -> None:
    prompt = ids(2 * B + 4, 21)
    assert rig.ask(prompt, cache="read").stats["stored_tokens"] == 0
    rig.restart()
    assert counts(rig.ask(prompt))[0] == len(prompt)


def test_a_damaged_shard_is_a_miss_from_there_on_and_is_quarantined(rig: Rig) -> None:
    prompt = ids(4 * B, 22)
    cold = rig.ask(prompt)
    rig.stop()
    shard = rig.shard(prompt, 1)
    damaged = bytearray(shard.read_bytes())
    damaged[-5] ^= 1
    shard.write_bytes(damaged)
    rig.start()
    again = rig.ask(prompt)
    assert counts(again) == (3 * B, 0, B)
    assert again.stats["miss_reason"] == "checksum"
    same(cold, again)
    rig.restart()
    assert counts(rig.ask(prompt))[0] == 1


def test_a_shard_that_vanished_is_a_miss_from_there_on(rig: Rig) -> None:
    prompt = ids(4 * B, 23)
    cold = rig.ask(prompt)
    rig.restart()
    rig.shard(prompt, 2).unlink()
    again = rig.ask(prompt)
    assert counts(again) == (2 * B, 0, 2 * B)
    assert again.stats["miss_reason"] == "vanished"
    same(cold, again)


def test_where_computing_is_measured_to_be_faster_than_loading_it_is_computed_and_said(rig: Rig) -> None:
    prompt = ids(6 * B, 29)
    cold = rig.ask(prompt)
    rig.restart()
    rig.on_engine(lambda: (rig.engine.rates.restored(1 << 24, 1000.0), rig.engine.rates.prefilled(0, 64, 0.001)))
    again = rig.ask(prompt)
    assert counts(again) == (6 * B, 0, 0)
    assert again.stats["miss_reason"] == "recompute_cheaper"
    same(cold, again)


def test_warm_stores_a_prefix_and_computes_no_answer(rig: Rig) -> None:
    prompt = ids(3 * B, 24)
    warmed = rig.send("warm", tokens=prompt).end()
    assert warmed.kind == "done"
    assert warmed.stats["completion_tokens"] == 0
    rig.restart()
    assert counts(rig.ask(prompt))[0] == 1


def test_a_pinned_prefix_is_pinned_to_its_last_durable_block(rig: Rig) -> None:
    prompt = ids(3 * B + 5, 28)
    rig.send("warm", tokens=prompt, pin=True, ttl_s=60.0).end()
    rig.on_engine(lambda: None)
    rig.stop()
    pins = json.loads((rig.folder / "store" / "pins.json").read_text())
    last = rig.cache.index.match(rig.cache.namespace, prompt).child
    rig.start()
    assert last is not None
    assert bytes(last.chain).hex() in json.dumps(pins)


def test_explain_says_what_is_cached_and_where_a_prompt_diverges(rig: Rig) -> None:
    prompt = ids(3 * B, 25)
    other = prompt[: 2 * B + 3] + ids(10, 26)
    rig.ask(prompt)
    for memory in (2 * B + 3, 0):
        answer = rig.send("explain", tokens=other).end()
        assert answer.kind == "result"
        assert answer.body["prompt_tokens"] == 2 * B + 13
        assert answer.body["cached_memory_tokens"] == memory
        assert answer.body["cached_ssd_tokens"] == 2 * B + 3 - memory
        assert answer.body["first_divergence"] == {
            "token": 2 * B + 3,
            "text": rig.tokenizer.decode([other[2 * B + 3]]),
            "stored_text": rig.tokenizer.decode([prompt[2 * B + 3]]),
        }
        assert answer.body["miss_reason"] == "diverged"
        rig.restart()


def test_the_finish_event_goes_out_before_the_commit_is_waited_for(rig: Rig) -> None:
    rig.hold_writes.set()
    answer = rig.send(tokens=ids(2 * B, 27))
    answer.wait_for("finish")
    assert not answer.ended.is_set()
    assert rig.on_engine(rig.engine._standing)[answer.id] == ("progress", {"done": 2 * B, "total": 2 * B, "cached": 0})
    rig.release_writes()
    assert answer.end().stats["stored_tokens"] == 2 * B + 3


def test_all_requests_that_the_front_sends_are_taken() -> None:
    """How many may wait is the front's to decide, by `daemon.max_waiting`."""
    with Rig(limits=Limits(chunk=64, max_live=1)) as rig:
        running = rig.send(tokens=ids(3000, 1), max_tokens=1)
        running.wait_for("progress")
        waiting = [rig.send(tokens=ids(30, 2 + n), max_tokens=1) for n in range(100)]
        assert {answer.end().kind for answer in (running, *waiting)} == {"done"}
