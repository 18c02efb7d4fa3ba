"""Events in order, merged while the link is behind, nothing after the end."""

from __future__ import annotations

import time

from kvclient.wire import message
from kvd.messages import Abandon
from kvd.worker.beat import Heart, Pulse
from kvd.worker.outbox import Outbox


def sent(outbox: Outbox) -> list[tuple[str, dict[str, object]]]:
    found = []
    while (one := outbox.take()) is not None:
        found.append((one.kind, one.body))
    return found


def test_unsent_text_of_one_choice_is_merged_and_progress_replaced() -> None:
    outbox = Outbox()
    outbox.event("progress", "a", {"done": 1, "total": 9, "cached": 0})
    outbox.event("progress", "a", {"done": 5, "total": 9, "cached": 0})
    for text in "xyz":
        outbox.event("text", "a", {"index": 0, "text": text})
    outbox.event("text", "a", {"index": 1, "text": "other"})
    outbox.event("text", "b", {"index": 0, "text": "b"})
    outbox.event("text", "a", {"index": 1, "text": "!"})
    assert sent(outbox) == [
        ("progress", {"done": 5, "total": 9, "cached": 0}),
        ("text", {"index": 0, "text": "xyz"}),
        ("text", {"index": 1, "text": "other!"}),
        ("text", {"index": 0, "text": "b"}),
    ]


def test_answers_of_one_request_that_come_in_turns_are_merged_each_for_itself() -> None:
    outbox = Outbox()
    for turn in range(100):
        for index in range(3):
            outbox.event("text", "a", {"index": index, "text": f"{turn},"})
            outbox.repeat("progress", "a", {"done": turn, "total": 99, "cached": 0}, time.monotonic() + 1)
    outbox.event("tool_call", "a", {"index": 1, "call": {}})
    for index in range(3):
        outbox.event("text", "a", {"index": index, "text": "end"})
    outbox.event("done", "a", {})
    turns = "".join(f"{turn}," for turn in range(100))
    texts = [(body["index"], body.get("text")) for kind, body in sent(outbox) if kind in ("text", "tool_call")]
    assert texts == [(0, turns + "end"), (1, turns), (2, turns + "end"), (1, None), (1, "end")]
    outbox.event("text", "a", {"index": 0, "text": "x"})
    assert len(outbox) == 1 and sent(outbox)


def test_log_probabilities_stay_with_their_text() -> None:
    outbox = Outbox()
    outbox.event("text", "a", {"index": 0, "text": "x", "logprobs": [1]})
    outbox.event("text", "a", {"index": 0, "text": "y", "logprobs": [2]})
    outbox.event("text", "a", {"index": 0, "text": "z"})
    assert sent(outbox) == [
        ("text", {"index": 0, "text": "xy", "logprobs": [1, 2]}), ("text", {"index": 0, "text": "z"}),
    ]  # fmt: skip


def test_what_was_taken_is_not_changed_any_more() -> None:
    outbox = Outbox()
    outbox.event("text", "a", {"index": 0, "text": "x"})
    first = outbox.take()
    outbox.event("text", "a", {"index": 0, "text": "y"})
    assert first == message("text", "a", {"index": 0, "text": "x"})
    assert sent(outbox) == [("text", {"index": 0, "text": "y"})]


def test_a_silent_request_is_told_its_standing_once_a_second_and_never_after_its_end() -> None:
    outbox = Outbox()
    heart = Heart(outbox)
    heart.pulse = Pulse("prefill", live={"a": ("progress", {"done": 1, "total": 2, "cached": 0})})
    outbox.event("queued", "a", {"position": 0})
    sent(outbox)
    now = time.monotonic()
    heart.beat(now)
    assert [kind for kind, _ in sent(outbox)] == ["beat"]
    heart.beat(now + 1.0)
    assert [kind for kind, _ in sent(outbox)] == ["beat", "progress"]
    outbox.event("done", "a", {})
    sent(outbox)
    heart.beat(now + 5.0)
    assert [kind for kind, _ in sent(outbox)] == ["beat"]


def test_messages_to_the_front_keep_their_order_and_wake_the_link() -> None:
    wakes: list[int] = []
    outbox = Outbox(lambda: wakes.append(len(wakes)))
    outbox.tell(Abandon(1, "x"))
    outbox.event("text", "a", {"index": 0, "text": "x"})
    outbox.tell(Abandon(2, "y"))
    assert [kind for kind, _ in sent(outbox)] == ["abandon", "text", "abandon"]
    assert len(wakes) == 3
