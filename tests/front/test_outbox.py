"""What waits for a slow client is bounded in entries, complete in text and in order."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvclient import wire
from kvclient.wire import Message
from kvd.front.outbox import Outbox


def text(id: str, words: str, index: int = 0, **more: Any) -> Message:
    return wire.message("text", id, {"text": words, "index": index, **more})


def drain(box: Outbox) -> list[Message]:
    found = []
    while box:
        found.append(box.peek())
        box.pop()
    return found


def test_text_of_one_choice_becomes_one_event() -> None:
    box = Outbox()
    for word in ("a", "b", "c"):
        box.add(text("r", word))
    assert [m.body for m in drain(box)] == [{"text": "abc", "index": 0}]
    assert box.size == 0


def test_choices_and_requests_are_not_mixed() -> None:
    box = Outbox()
    for message in (text("r", "a", 0), text("r", "b", 1), text("s", "c"), text("r", "d", 1)):
        box.add(message)
    found = [(m.id, m.body["index"], m.body["text"]) for m in drain(box)]
    assert found == [("r", 0, "a"), ("r", 1, "bd"), ("s", 0, "c")]


def test_answers_of_one_request_that_come_in_turns_are_merged_each_for_itself() -> None:
    box = Outbox()
    for turn in range(100):
        for index in range(3):
            box.add(text("r", f"{turn},", index))
    box.add(wire.message("tool_call", "r", {"index": 1, "call": {}}))
    for index in range(3):
        box.add(text("r", "end", index))
    assert len(box) == 7
    turns = "".join(f"{turn}," for turn in range(100))
    found = [(m.body["index"], m.body.get("text")) for m in drain(box)]
    assert found == [(0, turns), (1, turns), (2, turns), (1, None), (0, "end"), (1, "end"), (2, "end")]
    assert box.size == 0


def test_log_probabilities_stay_with_their_text() -> None:
    box = Outbox()
    for word in ("a", "b"):
        box.add(text("r", word, logprobs=[{"token": word}]))
    box.add(text("r", "c"))
    assert [m.body.get("logprobs") for m in drain(box)] == [[{"token": "a"}, {"token": "b"}], None]


def test_only_the_newest_progress_is_kept() -> None:
    box = Outbox()
    box.add(wire.message("queued", "r", {"position": 1}))
    for done in range(5):
        box.add(wire.message("progress", "r", {"done": done, "total": 9, "cached": 0}))
    assert [m.body for m in drain(box)] == [{"done": 4, "total": 9, "cached": 0}]


def test_reasoning_and_text_keep_their_order() -> None:
    box = Outbox()
    for kind in ("reasoning", "text", "reasoning"):
        box.add(wire.message(kind, "r", {"text": kind, "index": 0}))
    box.add(wire.message("done", "r", {}))
    assert [m.kind for m in drain(box)] == ["reasoning", "text", "reasoning", "done"]


@given(st.lists(st.tuples(st.sampled_from("rs"), st.sampled_from([0, 1]), st.text(max_size=3), st.booleans())))
def test_whatever_is_taken_in_between_the_text_of_each_choice_is_whole(steps: list[tuple[str, int, str, bool]]) -> None:
    box, sent, got = Outbox(), {}, {}  # type: ignore[var-annotated]

    def take() -> None:
        message = box.peek()
        box.pop()
        key = (message.id, message.body["index"])
        got[key] = got.get(key, "") + message.body["text"]

    for id, index, words, taking in steps:
        box.add(text(id, words, index))
        sent[id, index] = sent.get((id, index), "") + words
        if taking:
            take()
    while box:
        take()
    assert got == sent and box.size == 0
