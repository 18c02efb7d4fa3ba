"""Volatile text: lines near the top of a prompt that differ between sessions and make every prefix after them new.

Agents put dates, session ids and billing nonces into their system prompt. Attention caches are reused up to the
first different token, so one such line at the top means that nothing is reused. The rules below move or blank known
lines. They are pure functions over chat messages, off unless a model names them (`kv-gateway --volatile
MODEL=RULE,RULE`), and what they did is in the reply's `kvd.volatile`:

    billing   blanked   lines `x-anthropic-billing-header: …`; `cch=…` values anywhere
    session   moved     a line with a session, conversation, request or trace id
    date      moved     a line that states today's date
    time      last      a line that states a date with a clock time

"moved" is to the end of the first user message: it is the same text for the whole conversation, so it costs nothing
from turn to turn, and the system prompt and tools before it are shared by all sessions. "last" is to the end of the
last user message, since a clock differs on every request. "blanked" removes the text: nothing a model needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from kvclient.errors import BadRequest

HEAD_LINES: Final = 400
"""Rules look at this many lines of the system prompt."""


class Action(StrEnum):
    BLANK = "blanked"
    MOVE = "moved"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Rule:
    """`pattern` is searched in each line; BLANK removes what it matches, the others take the whole line."""

    name: str
    action: Action
    pattern: re.Pattern[str]


_OTHER = str.maketrans("0123456789", "1234567890")
_DATE = r"(?:\d{4}-\d{1,2}-\d{1,2}|\d{1,2}[./]\d{1,2}[./]\d{2,4}|" \
    r"(?:(?:mon|tues|wednes|thurs|fri|satur|sun)day,?\s+)?(?:\d{1,2}\s+)?(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?\s*\d{0,2}(?:st|nd|rd|th)?,?\s+\d{4})"
_TODAY = r"(?:today(?:'|’)?s?\s+(?:date\s+)?(?:is|:)|today(?:'|’)s\s+date\b|" \
    r"(?:the\s+)?current\s+date(?:\s+and\s+time|time)?\b|(?:it|now)\s+is\b|(?:the\s+)?current\s+time\b|\bdate:|\btime:|now:)"
_CLOCK = r"\b\d{1,2}:\d{2}(?::\d{2})?\b"

RULES: Final[Mapping[str, Rule]] = {
    rule.name: rule
    for rule in (
        Rule(
            "billing", Action.BLANK,
            re.compile(r"^\s*x-anthropic-billing-header:.*$|\bcch=[0-9a-zA-Z_-]+;?", re.IGNORECASE),
        ),
        Rule(
            "session", Action.MOVE,
            re.compile(
                r"\b(?:session|conversation|request|trace|thread|run)[ _-]?id\b\W{0,4}[\w-]{6,}|\bnonce\b\W{0,4}\w{6,}",
                re.IGNORECASE,
            ),
        ),
        # Before `date`: a line with a clock changes on every request.
        Rule(
            "time", Action.LAST,
            re.compile(rf"{_TODAY}.*{_DATE}.*{_CLOCK}|{_TODAY}(?:\s+is|:)?\s*{_CLOCK}", re.IGNORECASE),
        ),
        Rule("date", Action.MOVE, re.compile(rf"{_TODAY}.*{_DATE}", re.IGNORECASE)),
    )
}


@dataclass(frozen=True, slots=True)
class Applied:
    """What one rule did: how many lines it took or blanked. The text itself is not repeated."""

    rule: str
    action: str
    lines: int


@dataclass(frozen=True, slots=True)
class Steadied:
    messages: list[dict[str, Any]]
    applied: tuple[Applied, ...]


def rules_named(names: Iterable[str]) -> list[Rule]:
    """Rules in the order they apply. Raises BadRequest for a name that does not exist."""
    wanted = set(names)
    if unknown := wanted - set(RULES):
        raise BadRequest(f"unknown volatile rule {sorted(unknown)[0]!r}; there are {', '.join(RULES)}")
    return [rule for name, rule in RULES.items() if name in wanted]


def steady(messages: Sequence[Mapping[str, Any]], rules: Sequence[Rule]) -> Steadied:
    """Apply `rules` to the leading system messages. Messages are not changed in place; without a match they come back
    equal. Only text content is looked at."""
    found = [dict(message) for message in messages]
    counts: dict[str, int] = {}
    moved: list[str] = []
    last: list[str] = []
    for message in found:
        if message.get("role") != "system" or not isinstance(message.get("content"), str):
            break
        kept: list[str] = []
        for number, line in enumerate(str(message["content"]).split("\n")):
            changed, rule = (line, None) if number >= HEAD_LINES else _apply(line, rules)
            if rule is None:
                kept.append(line)
                continue
            counts[rule.name] = counts.get(rule.name, 0) + 1
            if rule.action is Action.BLANK:
                if changed.strip():
                    kept.append(changed)
            else:
                (moved if rule.action is Action.MOVE else last).append(line.strip())
        message["content"] = "\n".join(kept)
    users = [m for m in found if m.get("role") == "user" and isinstance(m.get("content"), str)]
    if (moved or last) and not users:
        return Steadied([dict(message) for message in messages], ())  # nowhere to move to: change nothing
    for lines, at in ((moved, 0), (last, -1)):
        if lines:
            users[at]["content"] += "\n\n" + "\n".join(lines)
    return Steadied(found, tuple(Applied(n, RULES[n].action.value, c) for n, c in counts.items()))


def _apply(line: str, rules: Sequence[Rule]) -> tuple[str, Rule | None]:
    for rule in rules:
        if rule.pattern.search(line):
            return (rule.pattern.sub("", line) if rule.action is Action.BLANK else line), rule
    return line, None


def another(messages: Sequence[Mapping[str, Any]], rule: Rule) -> list[dict[str, Any]]:
    """The same request from another day or session: digits in the text that `rule` is about are other ones."""
    found = [dict(message) for message in messages]
    for message in found:
        if message.get("role") != "system" or not isinstance(message.get("content"), str):
            break
        lines = str(message["content"]).split("\n")
        head = [line.translate(_OTHER) if rule.pattern.search(line) else line for line in lines[:HEAD_LINES]]
        message["content"] = "\n".join([*head, *lines[HEAD_LINES:]])
    return found


def helpful(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the rules that would change these messages: what `explain` can try."""
    return [name for name, rule in RULES.items() if steady(messages, [rule]).applied]
