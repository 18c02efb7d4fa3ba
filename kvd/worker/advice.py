"""Which rule for volatile text would let a prompt share more with others, and how much. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvclient.gateway.volatile import RULES, another, helpful, steady
from kvd.cache.chain import common_prefix

Messages = Sequence[Mapping[str, Any]]


def rules(messages: Messages, tokens_of: Callable[[Messages], Sequence[int]]) -> tuple[dict[str, Any], ...]:
    """`{"name", "saved_tokens"}` of each rule that helps, most first. What it saves are the tokens that two requests
    share more with the rule than without, when they differ in nothing but the text the rule is about."""
    found = []
    for name in helpful(messages):
        other = another(messages, RULES[name])
        without = common_prefix(tokens_of(messages), tokens_of(other))
        calm, calm_other = (steady(one, [RULES[name]]).messages for one in (messages, other))
        saved = common_prefix(tokens_of(calm), tokens_of(calm_other)) - without
        if saved > 0:
            found.append({"name": name, "saved_tokens": saved})
    return tuple(sorted(found, key=lambda one: -int(one["saved_tokens"])))
