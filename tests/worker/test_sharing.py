"""Several requests at once: batches, live sharing, preemption, seeds. Each answer is the one it gets alone."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvclient.errors import Internal
from kvd.cache.results import Consent
from kvd.worker.scheduler import Limits
from tests.worker.rig import PATIENCE, Answer, B, Rig, ids, rows_seen

WITHIN = Limits(chunk=256, beside_s=math.inf, turn_s=0.0)
"""Chunks of one size on however slow a machine, with turns of the streams between any two layers."""


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as rig:
        yield rig


def computed(answer: Answer) -> int:
    stats = answer.stats
    assert stats["cached_tokens"] + stats["computed_tokens"] == stats["prompt_tokens"]
    return int(stats["computed_tokens"])


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_each_answer_of_a_batch_is_the_one_it_gets_alone(rig: Rig, count: int) -> None:
    prompts = [ids(20 + 13 * n, 30 + n) for n in range(count)]
    alone = [rig.ask(prompt, max_tokens=12, cache="off", logit_bias={2: -100}).text for prompt in prompts]
    together = [rig.send(tokens=prompt, max_tokens=12, logit_bias={2: -100}) for prompt in prompts]
    assert [answer.end().text for answer in together] == alone


def test_answers_are_right_when_others_are_cancelled_in_the_middle(rig: Rig) -> None:
    prompts = [ids(30 + 7 * n, 50 + n) for n in range(6)]
    options = {"max_tokens": 100, "logit_bias": {2: -100}}
    alone = [rig.ask(prompt, cache="off", **options).text for prompt in prompts]
    running = [rig.send(tokens=prompt, **options) for prompt in prompts]
    for answer in running[::2]:
        answer.wait_for("text")
        rig.engine.cancel(answer.id, "asked")
    assert [answer.end().text for answer in running[1::2]] == alone[1::2]
    for answer, full in zip(running[::2], alone[::2], strict=True):
        assert full.startswith(answer.end().text.rstrip("\ufffd"))
        assert answer.deltas == answer.text


def test_one_prefix_asked_by_many_at_once_is_computed_once(rig: Rig) -> None:
    prefix = ids(40 * B, 60)
    cold = rig.ask(prefix, cache="off")
    answers = [rig.send(tokens=prefix, logprobs=True, top_logprobs=5) for _ in range(5)]
    assert sorted(computed(answer.end()) for answer in answers) == [1, 1, 1, 1, len(prefix)]
    for answer in answers:
        assert answer.text == cold.text


def test_a_longer_prompt_joins_the_prefill_of_its_prefix(rig: Rig) -> None:
    prefix = ids(150 * B + 5, 61)
    first = rig.send(tokens=prefix)
    first.wait_rows(64)
    other = rig.send(tokens=prefix + ids(9, 62))
    assert computed(first.end()) == len(prefix)
    assert computed(other.end()) == 9


def test_a_cancelled_leader_leaves_its_rows_to_those_that_wait(rig: Rig) -> None:
    prefix = ids(3000, 63)
    leader = rig.send(tokens=prefix)
    leader.wait_rows(64)
    follower = rig.send(tokens=prefix)
    rig.engine.cancel(leader.id, "asked")
    done = leader.end().stats["computed_tokens"]
    assert computed(follower.end()) == len(prefix) - done


def test_sequences_with_one_prefix_hold_it_once(rig: Rig) -> None:
    prefix = ids(20 * B, 64)
    rig.ask(prefix)
    answers = [rig.send(tokens=prefix + ids(2, 70 + n), max_tokens=60, logit_bias={2: -100}) for n in range(4)]
    for answer in answers:
        answer.wait_for("text")
    live = rig.on_engine(lambda: rig.cache.stats.blocks_live)
    assert live <= 20 + 4 * 5
    for answer in answers:
        answer.end()


def test_answers_of_one_request_that_end_at_different_tokens_leave_the_others_alone(rig: Rig) -> None:
    """A step that is in line when one of its answers ends must not be followed as if it had not."""
    for seed in range(12):
        answer = rig.send(tokens=ids(20, seed), n=3, temperature=1.0, seed=seed, max_tokens=30, logit_bias={2: 3}).end()
        for choice in answer.body["choices"]:
            assert choice["finish_reason"] in ("stop", "length")
    assert rig.on_engine(lambda: (rig.cache.stats.sequences, rig.cache.stats.blocks_live)) == (0, 0)


def test_a_request_cancelled_while_it_is_looked_up_leaves_nothing_behind(rig: Rig) -> None:
    prompt = ids(40, 200)
    rig.ask(prompt, max_tokens=1)
    rig.restart()
    rig.hold_lookups.set()
    answer = rig.send(tokens=prompt)
    answer.wait_for("progress")  # admitted: it waits for the store
    rig.engine.cancel(answer.id, "asked")
    answer.end()
    rig.release_lookups()
    assert rig.ask(ids(5, 1)).stats["computed_tokens"] == 5
    assert rig.on_engine(lambda: (rig.cache.stats.sequences, rig.cache.stats.blocks_live)) == (0, 0)


def test_n_answers_share_the_prompt_and_differ_by_their_keys(rig: Rig) -> None:
    prompt = ids(5 * B + 3, 65)
    options = {"temperature": 1.0, "seed": 5, "max_tokens": 10, "logit_bias": {2: -100}}
    many = rig.send(tokens=prompt, n=4, **options).end()
    texts = [choice["text"] for choice in many.body["choices"]]
    assert len(set(texts)) == 4
    assert many.stats["computed_tokens"] == len(prompt)
    assert many.stats["completion_tokens"] == 40
    assert [choice["finish_reason"] for choice in many.body["choices"]] == ["length"] * 4
    assert rig.send(tokens=prompt, **options).end().text == texts[0]


def test_a_seeded_request_gives_the_same_text_alone_and_in_a_batch(rig: Rig) -> None:
    prompts = [ids(25 + n, 80 + n) for n in range(4)]
    options = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 15, "logit_bias": {2: -100}}
    alone = [rig.send(tokens=p, seed=n, **options).end().text for n, p in enumerate(prompts)]
    again = [rig.send(tokens=p, seed=n, **options) for n, p in enumerate(prompts)]
    assert [answer.end().text for answer in again] == alone


def test_sequences_that_outgrow_the_pool_are_preempted_and_still_give_their_answer() -> None:
    options = {"max_tokens": 80, "logit_bias": {2: -100}}
    prompts = [ids(4 * B, 90 + n) for n in range(3)]
    with Rig() as rig:
        alone = [rig.send(tokens=p, cache="off", **options).end().text for p in prompts]
    with Rig(pool_blocks=16) as rig:
        answers = [rig.send(tokens=p, **options) for p in prompts]
        assert [answer.end().text for answer in answers] == alone
        assert sum(answer.stats["recomputed_tokens"] for answer in answers) > 0
        for answer in answers:
            assert computed(answer) == 4 * B


def test_who_gave_way_goes_on_before_those_that_come_after_it_however_many_there_are() -> None:
    options = {"logit_bias": {2: -100}, "durable_wait_ms": 0}
    now = time.monotonic()
    with Rig(pool_blocks=32) as rig:
        sent = threading.Event()
        large = rig.send(tokens=ids(20 * B, 1), max_tokens=180, arrival=now, **options)
        large.wait_for("text")
        rig.engine.post(lambda: sent.wait(PATIENCE))
        before = [rig.send(tokens=ids(6 * B, 2 + n), arrival=now - 100, max_tokens=40, **options) for n in range(2)]
        after = [
            rig.send(tokens=ids(6 * B, 4 + n), arrival=now + 100 + n, max_tokens=20 + 7 * (n % 3), **options)
            for n in range(12)
        ]
        sent.set()
        ended = large.end() and sum(answer.ended.is_set() for answer in after)
        assert large.stats["recomputed_tokens"] > 0, "it was to give way"
        assert ended <= 3
        assert {answer.end().kind for answer in (*before, *after)} == {"done"}


def test_who_gives_way_is_the_last_of_the_order_in_which_prompts_are_read() -> None:
    options = {"logit_bias": {2: -100}, "durable_wait_ms": 0}
    now = time.monotonic()
    with Rig(pool_blocks=24, limits=Limits(chunk=64, row_s=100.0)) as rig:
        rig.ask(ids(4 * B, 1), cache="off")  # now it is known that a row takes far less
        later = rig.send(tokens=ids(4 * B, 2), max_tokens=200, arrival=now + 100, **options)
        later.wait_for("text")
        first = rig.send(tokens=ids(20 * B, 3), max_tokens=4, arrival=now, **options)
        assert first.end().stats["recomputed_tokens"] == 0
        assert later.end().stats["recomputed_tokens"] > 0


def test_a_lone_answer_that_outgrows_the_pool_ends_with_its_text_and_both_numbers() -> None:
    options = {"max_tokens": 100, "logit_bias": {2: -100}}
    with Rig() as rig:
        whole = rig.send(tokens=ids(3 * B, 1), **options).end().text
    with Rig(pool_blocks=4) as rig:
        answer = rig.send(tokens=ids(3 * B, 1), **options).end()
        [choice] = answer.body["choices"]
        assert choice["finish_reason"] == "length" and answer.deltas == choice["text"]
        assert choice["text"] and whole.startswith(choice["text"].rstrip("\ufffd"))
        assert answer.stats["completion_tokens"] == B + 1  # the last was drawn, its row has no room
        block = B * rig.cache.layout.bytes_per_token()
        assert answer.stats["out_of_memory"] == {"needed": block, "available": 0, "what": "kv pool"}
        assert answer.stats["stored_tokens"] == 4 * B
        finish = next(body for kind, body in answer.events if kind == "finish")
        assert finish["finish_reason"] == "length"
        assert rig.ask(ids(2 * B, 3)).stats["out_of_memory"] is None


def test_an_answer_waits_for_room_that_is_being_made_and_goes_on() -> None:
    options = {"max_tokens": 100, "logit_bias": {2: -100}}
    asked: list[bool] = []

    def consent(nbytes: int, needed: bool) -> Consent:
        if nbytes > 0:
            asked.append(needed)
        if asked.count(True) > 3:
            return Consent.YES
        return Consent.SOON if needed else Consent.NO

    with Rig(consent=consent) as rig:
        answer = rig.send(tokens=ids(6 * B, 1), **options).end()
        assert (answer.body["choices"][0]["finish_reason"], answer.stats["completion_tokens"]) == ("length", 100)
        assert answer.stats["out_of_memory"] is None and asked.count(True) == 4
    with Rig() as rig:
        assert rig.send(tokens=ids(6 * B, 1), **options).end().text == answer.text


def test_answers_to_one_prompt_that_outgrow_the_pool_each_end_with_their_text() -> None:
    with Rig(pool_blocks=5) as rig:
        options = {"n": 2, "seed": 1, "temperature": 1.0, "max_tokens": 100, "logit_bias": {2: -100}}
        answer = rig.send(tokens=ids(3 * B, 1), **options).end()
        for choice in answer.body["choices"]:
            said = "".join(b["text"] for k, b in answer.events if k == "text" and b["index"] == choice["index"])
            assert choice["finish_reason"] == "length" and said == choice["text"] != ""
        assert answer.stats["out_of_memory"]["what"] == "kv pool"
        assert rig.on_engine(lambda: (rig.cache.stats.sequences, rig.cache.stats.blocks_live)) == (0, 0)


def test_a_stream_goes_on_within_a_chunk_of_a_long_prompt_and_both_get_their_answers() -> None:
    question, prompt = ids(30, 2), ids(1500, 1)
    options = {"max_tokens": 400, "logit_bias": {2: -100}}
    with Rig(model={"layers": 6}, limits=WITHIN) as rig:
        alone = [rig.send(tokens=question, cache="off", **options).end().text, rig.ask(prompt, cache="off").logprobs]
        stream = rig.send(tokens=question, **options)
        stream.wait_for("text")
        fed = rig.on_engine(lambda: rows_seen(rig))
        long = rig.ask(prompt)
        assert [stream.end().text, long.logprobs] == alone
        within = fed[fed.index(256) : fed.index(1499 % 256)]
        assert within.count(1) >= 5 * within.count(256)
        assert rig.on_engine(lambda: (rig.cache.stats.sequences, rig.cache.stats.blocks_live)) == (0, 0)


def test_a_stream_that_ends_or_fails_within_a_chunk_leaves_the_chunk_alone() -> None:
    prompt = ids(1500, 1)
    with Rig(model={"layers": 6}, limits=WITHIN) as rig:
        alone = rig.ask(prompt, cache="off").logprobs
        streams = [rig.send(tokens=ids(30, n), max_tokens=10 + 3 * n, logit_bias={2: -100}) for n in range(2, 7)]
        streams[0].wait_for("text")
        long = rig.ask(prompt)
        assert long.logprobs == alone
        for n, answer in enumerate(streams, 2):
            assert answer.end().stats["completion_tokens"] == 10 + 3 * n
        assert rig.on_engine(lambda: (rig.cache.stats.sequences, rig.cache.stats.blocks_live)) == (0, 0)


def test_an_answer_whose_text_fails_ends_its_request_alone(rig: Rig) -> None:
    options = {"max_tokens": 60, "logit_bias": {2: -100}}
    alone = rig.send(tokens=ids(30, 1), cache="off", **options).end().text
    other = rig.send(tokens=ids(30, 1), **options)
    broken = rig.send(tokens=ids(30, 2), n=3, temperature=1.0, seed=1, **options)
    broken.wait_for("text", 9)

    def spoil() -> None:
        def push(token: int) -> Any:
            raise RuntimeError("not to be decoded")

        rig.engine._live.choice(f"{broken.id}/1").answer = SimpleNamespace(push=push)  # type: ignore[assignment]

    rig.on_engine(spoil)
    assert isinstance(broken.end().problem(), Internal)
    assert other.end().text == alone == rig.send(tokens=ids(30, 1), **options).end().text
    assert rig.on_engine(lambda: (rig.cache.stats.sequences, rig.cache.stats.blocks_live)) == (0, 0)


def test_a_short_question_is_answered_while_a_long_prompt_prefills() -> None:
    with Rig(limits=Limits(chunk=64)) as rig:
        long = rig.send(tokens=ids(3500, 1), max_tokens=1)
        long.wait_rows(64)
        short = rig.send(tokens=ids(30, 2), max_tokens=5).end()
        assert not long.ended.is_set()
        assert short.kind == "done"
        assert computed(long.end()) == 3500


@pytest.mark.parametrize("ahead", [True, False])
def test_steps_are_put_in_line_ahead_only_where_that_does_not_copy_the_pool(rig: Rig, ahead: bool) -> None:
    asked: list[bool] = []
    computer = rig.engine._computer
    finish = computer.finish

    def noted(wanted: bool) -> Any:
        asked.append(wanted)
        return finish(wanted)

    def prepare() -> None:
        rig.cache.paths = replace(rig.cache.paths, ahead=ahead)
        computer.finish = noted  # type: ignore[method-assign]

    rig.on_engine(prepare)
    expected = rig.send(tokens=ids(20), max_tokens=12, temperature=0.0).end()
    assert asked and any(asked) == ahead
    assert len(expected.text) > 0
