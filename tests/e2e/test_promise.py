"""Promise 1 and 2 on the demo model: a hit gives what recomputing gives, and nothing acknowledged is computed again."""

from __future__ import annotations

import itertools

import pytest

from kvclient import Client, TokenLogprob
from rig.daemon import Daemon
from tests.e2e.asking import ask, ids

B = 256
seeds = itertools.count(1000)


@pytest.mark.parametrize("length", [B - 1, B, B + 1, 3 * B, 3 * B + 77])
def test_a_repeat_computes_one_token_and_its_logits_are_bit_equal(kv: Client, length: int) -> None:
    prompt = ids(length, next(seeds))
    cold = ask(kv, prompt)
    assert cold.computed == length
    warm = ask(kv, prompt)
    assert (warm.computed, warm.memory) == (1, length - 1)
    assert warm.logprobs == cold.logprobs and warm.text == cold.text


def test_after_restart_and_after_kill_one_token_is_computed_and_logits_are_bit_equal(own_daemon: Daemon) -> None:
    prompt = ids(2 * B + 100, next(seeds))
    with own_daemon.client() as client:
        cold = ask(client, prompt)
    assert cold.stored >= len(prompt)
    own_daemon.restart()
    with own_daemon.client() as client:
        again = ask(client, prompt)
    assert (again.computed, again.ssd) == (1, len(prompt) - 1)
    assert again.logprobs == cold.logprobs
    own_daemon.kill()
    own_daemon.start()
    with own_daemon.client() as client:
        again = ask(client, prompt)
    assert (again.computed, again.ssd) == (1, len(prompt) - 1)
    assert again.logprobs == cold.logprobs


def test_a_daemon_killed_at_done_recomputes_what_was_not_durable_and_no_more(own_daemon: Daemon) -> None:
    prompt = ids(B + 50, next(seeds))
    with own_daemon.client() as client:
        first = ask(client, prompt)
        own_daemon.kill()
    own_daemon.start()
    with own_daemon.client() as client:
        again = ask(client, prompt)
    assert again.computed == max(1, len(prompt) - first.stored)
    assert again.logprobs == first.logprobs


@pytest.mark.parametrize("at", [10, B - 1, B, B + 1, 2 * B + 13])
def test_a_prompt_that_diverges_computes_only_what_is_new(kv: Client, at: int) -> None:
    prompt = ids(3 * B, next(seeds))
    ask(kv, prompt)
    other = prompt[:at] + ids(40, next(seeds))
    warm = ask(kv, other)
    assert warm.computed == 40
    cold = ask(kv, other, cache="off")
    assert cold.computed == len(other)
    close(warm.logprobs, cold.logprobs)


def close(a: list[TokenLogprob], b: list[TokenLogprob]) -> None:
    """|delta| <= 1e-3 for every token that both list, as promise 1 says across shapes."""
    ours, theirs = list(numbers(a)), list(numbers(b))
    shared = dict(ours).keys() & dict(theirs).keys()
    assert shared
    for key in shared:
        assert abs(dict(ours)[key] - dict(theirs)[key]) <= 1e-3


def numbers(logprobs: list[TokenLogprob]) -> list[tuple[tuple[int, int], float]]:
    """((position, token id), log probability) of the first token's alternatives."""
    return [((0, top.id), top.logprob) for top in logprobs[0].top]


def test_resending_at_once_hits_every_time(kv: Client) -> None:
    prompt = ids(B + 9, next(seeds))
    ask(kv, prompt, durable_wait_ms=0)
    for _ in range(100):
        assert ask(kv, prompt, max_tokens=1, durable_wait_ms=0).computed == 1


def test_alternating_conversations_compute_only_their_own_suffix(kv: Client) -> None:
    trunk = ids(B + 100, next(seeds))
    branches = [trunk + ids(60, next(seeds)) for _ in range(3)]
    ask(kv, trunk)
    for branch in branches:
        assert ask(kv, branch).computed == 60
    for _ in range(2):
        for branch in branches:
            assert ask(kv, branch).computed == 1


def test_unload_and_reload_keep_the_cache(kv: Client) -> None:
    prompt = ids(B + 30, next(seeds))
    cold = ask(kv, prompt)
    kv.unload("demo")
    warm = ask(kv, prompt)
    assert (warm.computed, warm.ssd) == (1, len(prompt) - 1)
    assert warm.logprobs == cold.logprobs


def test_salts_share_nothing(kv: Client) -> None:
    prompt = ids(B + 5, next(seeds))
    ask(kv, prompt, salt="a")
    assert ask(kv, prompt, salt="b").computed == len(prompt)
    assert ask(kv, prompt, salt="a").computed == 1


def test_a_prompt_that_is_prefilled_beside_a_stream_gives_what_it_gives_alone(daemon: Daemon, kv: Client) -> None:
    """Its chunks are others then, and the stream's steps run between their layers. A repeat has its bits."""
    prompt = ids(1024 + 64 + 1, next(seeds))
    alone = ask(kv, prompt, cache="off")
    with daemon.client() as other:
        stream = other.stream("demo", tokens=ids(40, next(seeds)), max_tokens=2000, logit_bias={0: -100.0, 2: -100.0})
        next(event for event in stream if event.kind == "text")
        beside = ask(kv, prompt)
        assert beside.computed == len(prompt)
        assert next(stream).kind == "text"
        stream.close()
    close(beside.logprobs, alone.logprobs)
    repeat = ask(kv, prompt)
    assert repeat.computed == 1
    assert repeat.logprobs[0] == beside.logprobs[0]
