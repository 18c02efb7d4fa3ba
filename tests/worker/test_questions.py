"""A front whose store hangs costs a request what is stored of its prompt, not its answer."""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from kvd.messages import LookedUp, Lookup
from kvd.worker import questions
from kvd.worker.questions import UNANSWERED, Questions
from tests.worker.rig import B, Rig, counts, ids, same, until


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as rig:
        yield rig


def test_a_store_that_does_not_answer_is_waited_for_once_and_asked_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ids(4 * B, 1), ids(5 * B, 2)
    cold = [rig.ask(first), rig.ask(second)]
    rig.on_engine(rig.cache.clear)
    rig.hold_lookups.set()
    with capture_logs() as logs:
        running = rig.send(tokens=first, logprobs=True, top_logprobs=5)
        running.wait_for("progress")
        assert rig.on_engine(rig.engine.stats)["loading"] == 1
        with monkeypatch.context() as time:
            time.setattr(questions, "HUNG_S", 0.0)
            rig.on_engine(lambda: None)
            same(cold[0], running.end())
        at_once = rig.ask(second)
        same(cold[1], at_once)
        for one, tokens in ((running, first), (at_once, second)):
            assert counts(one) == (len(tokens), 0, 0, 0) and one.stats["miss_reason"] == "read_failed"
        again = rig.ask(second)
        assert counts(again)[:2] == (1, len(second) - 1) and again.stats["miss_reason"] is None
        rig.release_lookups()
        until(lambda: not rig.engine._admission.questions._silent)
        rig.on_engine(rig.cache.clear)
        assert counts(rig.ask(first)) == (1, 0, len(first) - 1, 0)
    assert [(one["log_level"], one["event"]) for one in logs] == [
        ("warning", "the store does not answer: prompts are computed"), ("info", "the store answers again"),
    ]  # fmt: skip


def test_the_engine_stops_waiting_without_being_woken(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ids(3 * B, 3)
    cold = rig.ask(asked)
    rig.on_engine(rig.cache.clear)
    rig.hold_lookups.set()
    monkeypatch.setattr(questions, "HUNG_S", 0.1)
    same(cold, rig.ask(asked))


def test_explain_says_what_memory_has(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ids(3 * B, 4)
    rig.ask(asked)
    rig.hold_lookups.set()
    monkeypatch.setattr(questions, "HUNG_S", 0.1)
    assert rig.send("explain", tokens=asked).end().body["cached_memory_tokens"] == len(asked)
    rig.on_engine(rig.cache.clear)
    body = rig.send("explain", tokens=asked).end().body
    assert (body["cached_memory_tokens"], body["miss_reason"]) == (0, "read_failed")


def test_what_nobody_waits_for_is_asked_without_the_prompt() -> None:
    """Prompts that wait for a store that hangs would fill the front's memory."""
    clock, told, heard = SimpleNamespace(now=0.0), SimpleQueue[Lookup](), list[LookedUp]()
    asked = Questions(SimpleNamespace(tell=told.put), lambda: clock.now)  # type: ignore[arg-type]
    prompt = bytes(16), [b"chain"], list(range(1000)), heard.append
    asked.ask(*prompt)
    assert told.get().tail == tuple(range(1000)) and not heard
    clock.now += questions.HUNG_S
    asked.expire()
    asked.ask(*prompt)
    late = told.get()
    assert (late.chains, late.tail) == ((), ()) and heard == [UNANSWERED, UNANSWERED]
    asked.answered(LookedUp(late.q, (), None, 0))
    asked.ask(*prompt)
    assert told.get().chains == (b"chain",) and len(heard) == 2
