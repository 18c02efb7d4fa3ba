"""Rules for volatile text, on lines that agents really send."""

from __future__ import annotations

from typing import Any

import pytest

from kvclient.errors import BadRequest
from kvclient.gateway.volatile import RULES, helpful, rules_named, steady

ALL = list(RULES.values())


def chat(system: str, *users: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}, *({"role": "user", "content": user} for user in users)]


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("x-anthropic-billing-header: cc_version=2.1.37.f3d; cc_entrypoint=cli; cch=fa690;", "billing"),
        ("Today's date: 2026-02-03", "date"),
        ("Today's date is 2026-02-03.", "date"),
        ("Today is Tuesday, February 3, 2026.", "date"),
        ("  Current date: 3 Feb 2026", "date"),
        ("The current date is 2026-02-03.", "date"),
        ("Current Date and Time: 2026-02-03 10:11:12 UTC", "time"),
        ("The current time is 10:11", "time"),
        ("Session ID: 0b7d6a5e-9d1c-4a51-8a77-3f4d1e7b", "session"),
        ("conversation_id=abc123def", "session"),
        ("Nonce: 8f2a9c11", "session"),
    ],
)
def test_a_known_line_is_taken_by_its_rule_and_two_days_share_a_prefix(line: str, rule: str) -> None:
    found = steady(chat(f"You are an agent.\n{line}\nBe brief.", "Hi", "And?"), ALL)
    assert [(one.rule, one.lines) for one in found.applied] == [(rule, 1)]
    assert found.messages[0]["content"] == "You are an agent.\nBe brief."
    texts = {"billing": "", "date": found.messages[1]["content"], "session": found.messages[1]["content"],
             "time": found.messages[2]["content"]}  # fmt: skip
    assert rule == "billing" or texts[rule].endswith(line.strip())


@pytest.mark.parametrize(
    "line",
    [
        "Use ISO dates such as 2026-02-03 in file names.",
        "The function was added on 3 Feb 2026.",
        "Always close the session when you are done.",
        "Meetings start at 10:30.",
        "def today(): return date.today()",
        "it is important to be brief",
    ],
)
def test_ordinary_text_stays(line: str) -> None:
    messages = chat(f"A\n{line}\nB", "Hi")
    assert steady(messages, ALL).messages == messages
    assert helpful(messages) == []


def test_what_is_moved_is_not_lost() -> None:
    found = steady(chat("A\nToday's date: 2026-02-03\nSession ID: abcdef12", "Hi"), ALL)
    assert found.messages[1]["content"] == "Hi\n\nToday's date: 2026-02-03\nSession ID: abcdef12"


def test_a_cch_inside_a_line_is_blanked_and_the_rest_stays() -> None:
    assert steady(chat("run cch=12ab; now", "Hi"), ALL).messages[0]["content"] == "run  now"


def test_nothing_changes_where_there_is_no_user_message_to_move_to() -> None:
    messages = chat("Today's date: 2026-02-03")
    found = steady(messages, ALL)
    assert found.messages == messages and found.applied == ()


def test_only_leading_system_messages_are_looked_at_and_the_input_is_left_alone() -> None:
    messages = chat("A", "Today's date: 2026-02-03") + [{"role": "system", "content": "Today's date: 2026-02-03"}]
    before = [dict(message) for message in messages]
    assert steady(messages, ALL).messages == before == messages


def test_without_rules_nothing_happens_and_an_unknown_rule_is_an_error() -> None:
    messages = chat("Today's date: 2026-02-03", "Hi")
    assert steady(messages, []).messages == messages
    with pytest.raises(BadRequest, match="unknown volatile rule 'dates'"):
        rules_named(["dates"])


def test_helpful_names_the_rules_that_would_change_something() -> None:
    assert helpful(chat("Today's date: 2026-02-03\ncch=12ab;", "Hi")) == ["billing", "date"]
