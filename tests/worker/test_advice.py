"""What a rule for volatile text would save, in characters instead of tokens."""

from __future__ import annotations

from typing import Any

from kvd.worker.advice import rules

TAIL = "Be brief. " * 10


def tokens_of(messages: Any) -> list[int]:
    return [ord(c) for message in messages for c in f"<{message['role']}>{message['content']}"]


def chat(*lines: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "\n".join([*lines, TAIL])}, {"role": "user", "content": "Hi"}]


def test_a_date_at_the_top_costs_what_stands_below_it() -> None:
    (found,) = rules(chat("You are an agent.", "Today's date: 2026-02-03"), tokens_of)
    assert found["name"] == "date"
    # With the rule two days share everything up to the date itself, now behind the user's text.
    assert len(TAIL) < found["saved_tokens"] <= len(TAIL) + len("<user>Hi\n\nToday's date: ") + 2


def test_the_rule_that_saves_most_comes_first_and_none_is_named_without_need() -> None:
    found = rules(chat("cch=12ab34;", "x" * 50, "Session ID: abc12345"), tokens_of)
    assert [one["name"] for one in found] == ["billing", "session"]
    assert rules(chat("You are an agent."), tokens_of) == ()
    assert rules([], tokens_of) == ()
