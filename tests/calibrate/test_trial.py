"""Trials run over the real pool: what they give is what mlx-lm's caches give."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from kvd.cache import precision
from kvd.cache.inspection import inspect_layout
from kvd.cache.paths import Paths
from kvd.calibrate import trial
from kvd.calibrate.compare import Reference
from kvd.calibrate.material import Material, Probe
from kvd.calibrate.trial import Setup
from tests.cache.support import model, near, prompt, same

PREFIX, WINDOW = 200, 40


@pytest.fixture(scope="module")
def setup() -> Setup:
    return Setup(model(), lambda layout: Paths(), block=16, chunk=64, stops=frozenset({2}), tick=lambda: None)


@pytest.fixture(scope="module")
def material() -> Material:
    ids = prompt(PREFIX + WINDOW, 5)
    return Material(tuple(ids[:PREFIX]), tuple(ids[PREFIX:]), 9, (), (tuple(prompt(7, 1)), tuple(prompt(5, 2))), ())


def stock(net, ids) -> mx.array:
    out = net(mx.array([list(ids)]), cache=make_prompt_cache(net))[0]
    mx.eval(out)
    return out


def test_native_logits_of_the_window_are_mlx_lms(setup: Setup, material: Material) -> None:
    filled = trial.prefill(setup, inspect_layout(setup.model), material)
    got = trial.window(setup, filled, material.window)
    assert near(got, stock(setup.model, (*material.prefix, *material.window))[-WINDOW:])


def test_a_transplant_at_native_precision_changes_no_bit(setup: Setup, material: Material) -> None:
    layout = inspect_layout(setup.model)
    filled = trial.prefill(setup, layout, material)
    moved = trial.transplant(setup, layout, material, filled)
    assert same(trial.window(setup, filled, material.window), trial.window(setup, moved, material.window))


def test_a_transplant_shows_less_than_the_full_run_but_its_order(setup: Setup, material: Material) -> None:
    layout = inspect_layout(setup.model)
    native = trial.prefill(setup, layout, material)
    reference = Reference.of(trial.window(setup, native, material.window), material.window, material.following)
    native.sequence.truncate(PREFIX)
    found = {}
    for name in ("k8v8", "k4v4"):
        quantised = precision.apply(layout, name)
        full = trial.prefill(setup, quantised, material)
        short = trial.transplant(setup, quantised, material, native)
        found[name] = [reference.quality(trial.window(setup, one, material.window)).kld_mean for one in (full, short)]
    assert 0 < found["k8v8"][0] < found["k4v4"][0] and 0 < found["k8v8"][1] < found["k4v4"][1]


def test_answers_decoded_together_are_those_of_each_question_alone(setup: Setup, material: Material) -> None:
    filled = trial.prefill(setup, inspect_layout(setup.model), material)
    answers, first_s = trial.answer(setup, filled, material.questions)
    assert first_s > 0 and filled.sequence.rows == PREFIX
    for question, answer in zip(material.questions, answers, strict=True):
        ids = [*material.prefix, *question]
        for token in answer:
            assert int(mx.argmax(stock(setup.model, ids)[-1]).item()) == token
            ids.append(token)


def test_a_needle_is_found_only_if_every_token_of_its_answer_is(setup: Setup, material: Material) -> None:
    filled = trial.prefill(setup, inspect_layout(setup.model), material)
    [answer, _], _ = trial.answer(setup, filled, material.questions)
    question = material.questions[0]
    assert trial.recalled(setup, filled, Probe((*question, *answer[:4]), 4))
    wrong = (*question, *answer[:3], (answer[3] + 1) % 500)
    assert not trial.recalled(setup, filled, Probe(wrong, 4))
    assert filled.sequence.rows == PREFIX


@pytest.mark.parametrize("kv", ["native", "k8v8", "k8v4", "k4v4", "k8v4,0=native"])
def test_what_the_pool_takes_is_the_formula(setup: Setup, kv: str) -> None:
    """F28, by mlx's own count of memory. Each array may be rounded up to a page."""
    layout = precision.apply(inspect_layout(setup.model), kv)
    ids = prompt(2048, 3)
    made = Material(tuple(ids[:2000]), tuple(ids[2000:]), None, (), (), ())
    filled = trial.prefill(setup, layout, made)
    assert filled.pool_bytes / 2048 == pytest.approx(layout.bytes_per_token(), rel=0.02)
    assert filled.peak_bytes >= filled.pool_bytes
