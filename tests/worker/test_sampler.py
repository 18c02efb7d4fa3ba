"""Draws depend on their own request alone."""

from __future__ import annotations

import hashlib

import mlx.core as mx
import pytest

from kvd.worker.params import Sampling
from kvd.worker.sampler import KEYS, Drawer, draw

VOCAB = 200


@pytest.fixture
def logits() -> mx.array:
    return mx.random.normal((4, VOCAB), key=mx.random.key(3))


KINDS = [
    Sampling(),
    Sampling(temperature=0.8, seed=1),
    Sampling(temperature=1.2, top_p=0.8, seed=2),
    Sampling(temperature=1.0, top_k=5, min_p=0.05, seed=3, logprobs=True, top_logprobs=3),
    Sampling(temperature=1.0, seed=4, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_drawn_the_same_alone_and_in_any_batch(logits: mx.array, kind: Sampling) -> None:
    def drawer(sampling: Sampling) -> Drawer:
        return Drawer(sampling, prompt=[1, 2, 3], output=[5, 5, 9])

    alone = draw(logits[1:2], [drawer(kind)])[0]
    for others in ([Sampling()] * 3, [Sampling(temperature=2.0, seed=9)] * 3, KINDS[:3]):
        mixed = [drawer(others[0]), drawer(kind), *map(drawer, others[1:])]
        assert draw(logits, mixed)[1] == alone


def test_each_position_choice_and_seed_has_its_own_draw(logits: mx.array) -> None:
    def drawn(seed: int, choice: int, position: int) -> int:
        flat = mx.zeros((1, VOCAB))
        return draw(flat, [Drawer(Sampling(temperature=1.0, seed=seed), choice, output=[0] * position)])[0].token

    tokens = {drawn(seed, choice, position) for seed in range(3) for choice in range(3) for position in range(3)}
    assert len(tokens) > 20
    assert drawn(1, 1, 1) == drawn(1, 1, 1)


def test_greedy_takes_the_first_and_top_k_of_one_is_greedy(logits: mx.array) -> None:
    best = mx.argmax(logits, axis=-1).tolist()
    assert [one.token for one in draw(logits, [Drawer(Sampling()) for _ in range(4)])] == best
    cold = [Sampling(temperature=t) for t in (1e-6, 1e-39, 5e-324)]  # divided by these, numbers are infinite
    for sampling in (Sampling(temperature=1.0, top_k=1), Sampling(temperature=1.0, top_p=0.0), *cold):
        assert [one.token for one in draw(logits, [Drawer(sampling) for _ in range(4)])] == best


def test_logprobs_are_normalised_and_in_order(logits: mx.array) -> None:
    one = draw(logits[:1], [Drawer(Sampling(logprobs=True, top_logprobs=5))])[0]
    expected = logits[0] - mx.logsumexp(logits[0])
    assert one.logprob == pytest.approx(expected[one.token].item(), abs=1e-5)
    assert [token for token, _ in one.top] == mx.argsort(-logits[0])[:5].tolist()
    assert list(one.top) == sorted(one.top, key=lambda pair: -pair[1])


def test_bias_and_penalties_change_what_is_drawn() -> None:
    flat = mx.zeros((1, VOCAB))
    assert draw(flat, [Drawer(Sampling(logit_bias=((17, 5.0),)))])[0].token == 17
    favoured = mx.where(mx.arange(VOCAB) == 8, 1.0, 0.0)[None]
    assert draw(favoured, [Drawer(Sampling(presence_penalty=2.0), output=[8])])[0].token != 8
    assert draw(favoured, [Drawer(Sampling(presence_penalty=2.0), prompt=[8])])[0].token == 8
    assert draw(favoured, [Drawer(Sampling(frequency_penalty=0.6), output=[8])])[0].token == 8
    assert draw(favoured, [Drawer(Sampling(frequency_penalty=0.6), output=[8, 8])])[0].token != 8
    close = favoured + 0.9
    assert draw(close, [Drawer(Sampling(repetition_penalty=4.0), prompt=[8])])[0].token != 8


def test_top_p_and_top_k_leave_only_the_likeliest() -> None:
    steps = -mx.arange(VOCAB).astype(mx.float32)[None]
    for sampling, allowed in ((Sampling(temperature=5.0, top_k=3), 3), (Sampling(temperature=5.0, top_p=0.8), 2)):
        seen = {draw(steps, [Drawer(sampling, output=[0] * n)])[0].token for n in range(200)}
        assert seen == set(range(allowed))


def test_keys_made_together_are_those_of_each_position():
    one, other = Drawer(Sampling(temperature=1.0, seed=7)), Drawer(Sampling(temperature=1.0, seed=7), choice=1)
    found = []
    for position in range(KEYS + 2):
        text = f"7/0/{position}".encode()
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
        assert one.key(0).tolist() == mx.random.key(number).tolist()
        assert one.key(0).tolist() != other.key(0).tolist()
        found.append(tuple(one.key(1).tolist()))
        one.accept(1)
        other.accept(1)
    assert len(set(found)) == KEYS + 2
