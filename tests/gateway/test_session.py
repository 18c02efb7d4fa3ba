"""An agent's session replayed through the gateway on the demo model: each turn computes only what is new.

`session.json` holds what a user and the tools say; the answers are the model's own, sent back as a client sends them.
A turn's prompt is its parent's prompt, the parent's answer as the template renders it, and the new text. What was
computed beyond the new text is *re-rendering*: rows of the answer whose tokens the template writes otherwise than the
model did. It is counted per turn and printed with the token where the two part.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

SESSION: dict[str, Any] = json.loads((Path(__file__).parent / "session.json").read_text())
ANSWER_TOKENS = 10
CALL_TOKENS = 60


@dataclass(frozen=True, slots=True)
class Turn:
    """`messages` are what was sent, `answer` what came back, `stats` the daemon's."""

    messages: list[dict[str, Any]]
    answer: dict[str, Any]
    stats: dict[str, Any]
    parent: Turn | None

    @property
    def rows(self) -> int:
        """Rows that are stored when the turn ends: the last token that was drawn is never fed."""
        return int(self.stats["prompt_tokens"] + self.stats["completion_tokens"] - 1)

    @property
    def rendered_anew(self) -> int:
        """Rows of the parent that could not be used."""
        return max(0, self.parent.rows - self.stats["cached_tokens"]) if self.parent else 0


@pytest.fixture(scope="module")
def turns(real_url: str) -> dict[str, Turn]:
    done: dict[str, Turn] = {}
    before = ""
    with httpx.Client(base_url=real_url, timeout=120) as http:
        for spec in SESSION["turns"]:
            done[spec["id"]] = take(http, spec, done.get(spec.get("after", before)))
            before = spec["id"]
    return done


def take(http: httpx.Client, spec: dict[str, Any], parent: Turn | None) -> Turn:
    messages = [*parent.messages, parent.answer] if parent else [{"role": "system", "content": SESSION["system"]}]
    if "result" in spec:
        assert parent is not None
        call = parent.answer["tool_calls"][0]
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": spec["result"]})
    else:
        messages.append({"role": "user", "content": spec["user"]})
    body = {"model": "demo", "messages": messages, "tools": SESSION["tools"], "temperature": 0}
    if "call" in spec:
        choice = {"type": "function", "function": {"name": spec["call"]}}
        body |= {"tool_choice": choice, "max_tokens": CALL_TOKENS}
    else:
        body |= {"stop": ["\n"], "max_tokens": ANSWER_TOKENS}
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    found = reply.json()
    answer = {key: value for key, value in found["choices"][0]["message"].items() if key != "refusal"}
    assert "call" not in spec or answer["tool_calls"][0]["function"]["name"] == spec["call"]
    return Turn(messages, answer, found["kvd"]["stats"], parent)


def test_each_turn_computes_only_what_is_new_to_the_token(turns: dict[str, Turn]) -> None:
    show(turns)
    for name, turn in turns.items():
        stats = turn.stats
        assert stats["computed_tokens"] == stats["prompt_tokens"] - stats["cached_tokens"], name
        if turn.parent is None:
            continue
        new = stats["prompt_tokens"] - turn.parent.rows
        assert stats["computed_tokens"] <= max(1, new + turn.rendered_anew), name
        if turn.rendered_anew:  # only an answer that the template wrote otherwise, and the reply says where
            assert "tool_calls" in turn.parent.answer, name
            assert stats["first_divergence"]["token"] == stats["cached_tokens"], name
            assert stats["cached_tokens"] > turn.parent.stats["prompt_tokens"], name


def test_an_edited_turn_and_a_branch_reuse_all_that_they_share(turns: dict[str, Turn]) -> None:
    for name, sibling in (("9 edited", "9"), ("branch at 6", "6")):
        turn = turns[name]
        # The template's opening and whatever words the texts share are reused beyond the parent's rows.
        assert turn.parent is not None and turn.stats["cached_tokens"] > turn.parent.rows, name
        assert turn.stats["first_divergence"]["token"] < turns[sibling].stats["prompt_tokens"], name


def test_the_same_turn_again_computes_one_token(turns: dict[str, Turn]) -> None:
    again, first = turns["12 again"], turns["12"]
    assert again.stats["computed_tokens"] == 1
    assert again.answer == first.answer


def show(turns: dict[str, Turn]) -> None:
    """The table that issue and README speak of; `pytest -s` shows it."""
    print(f"\n{'turn':<12} {'prompt':>7} {'cached':>7} {'computed':>9} {'of these':>9}  why")
    print(f"{'':<12} {'':>7} {'':>7} {'':>9} {'again':>9}")
    for name, turn in turns.items():
        stats, at = turn.stats, turn.stats["first_divergence"]
        why = f"at {at['token']}: sent {at['text']!r}, stored {at['stored_text']!r}" if at else ""
        print(
            f"{name:<12} {stats['prompt_tokens']:>7} {stats['cached_tokens']:>7} {stats['computed_tokens']:>9} "
            f"{turn.rendered_anew:>9}  {why}"
        )
