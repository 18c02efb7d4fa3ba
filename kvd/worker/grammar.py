"""Answers of a given shape: a grammar forbids, before each draw, every token that would leave it.

The parsing is llguidance's. A grammar is made in a preparation thread; each choice walks through its own copy.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

import llguidance
import llguidance.hf
import mlx.core as mx
import numpy as np

from kvclient.errors import BadRequest

LAYOUT: Final[Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""one way to write a value: left free, small models fill their answer with blanks"""
_BITS: Final = np.arange(8, dtype=np.uint8)


class Grammar:
    """Where one choice stands in its grammar. Engine thread only."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def copy(self) -> Grammar:
        return Grammar(self._matcher.deep_copy())

    def mask(self, vocab: int) -> mx.array:
        """[vocab] of 0 and -inf: tokens that may come next, the end of the answer among them where it may end."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = ((packed[:, None] >> _BITS) & 1).reshape(-1)[:vocab].astype(bool)
        bias = np.full(vocab, -np.inf, dtype=np.float32)
        bias[: len(allowed)][allowed] = 0.0
        return mx.array(bias)

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)

    @property
    def complete(self) -> bool:
        """Nothing may follow."""
        return bool(self._matcher.is_stopped())


class Grammars:
    """Makes grammars for one model. Thread-safe; the first use prepares the tokenizer's tables (about a second)."""

    def __init__(self, tokenizer: Any, vocab: int) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._lock = threading.Lock()
        self._tables: llguidance.LLTokenizer | None = None

    def of_format(self, response_format: Mapping[str, Any]) -> Grammar:
        """For `response_format` of type json_object or json_schema. Raises BadRequest for a schema that is none."""
        schema: Any = {"type": "object"}
        if response_format["type"] == "json_schema":
            schema = response_format["json_schema"]["schema"]
        return self._make(_json_grammar(schema), "response_format")

    def of_call(self, tools: Sequence[Mapping[str, Any]], start: str, end: str) -> Grammar:
        """One call of one of `tools`, between the model's tags."""
        calls = {"anyOf": [_call_schema(tool) for tool in tools]}
        known = self._tokenizer.get_vocab()
        opening, closing = (tag if tag in known else json.dumps(tag) for tag in (start, end))
        shape = json.dumps({**calls, "x-guidance": LAYOUT})
        lark = f'start: {opening} "\\n" call "\\n" {closing}\ncall: %json {shape}\n'
        return self._make(llguidance.LLMatcher.grammar_from_lark(lark), "tools")

    def of_text(self, never: str) -> Grammar:
        """Any text in which `never` does not occur, with the marks of reasoning where the model has such."""
        special = set(self._tokenizer.all_special_tokens)
        marks = [mark for mark in (self._tokenizer.think_start, self._tokenizer.think_end) if mark in special]
        held = re.escape(never).replace("/", r"\/")
        lark = f"start: TEXT (mark TEXT)*\nmark: {' | '.join(marks)}\n" if marks else "start: TEXT\n"
        lark += f"TEXT: /(?s:.*)/ & ~/(?s:.*){held}(?s:.*)/\n"
        return self._make(llguidance.LLMatcher.grammar_from_lark(lark), "tool_choice")

    def _make(self, grammar: str, field: str) -> Grammar:
        with self._lock:
            if self._tables is None:
                raw, eos = self._tokenizer._tokenizer, sorted(self._tokenizer.eos_token_ids)
                self._tables = llguidance.hf.from_tokenizer(raw, n_vocab=max(self._vocab, len(raw)), eos_token=eos)
        if problem := llguidance.LLMatcher.validate_grammar(grammar, self._tables):
            raise BadRequest(f"{field} cannot be followed: {problem.strip()}"[:300], field=field)
        return Grammar(llguidance.LLMatcher(self._tables, grammar, log_level=0))


def _json_grammar(schema: Any) -> str:
    try:
        return str(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=LAYOUT))
    except ValueError as problem:
        raise BadRequest(f"response_format is no JSON schema: {problem}"[:300], field="response_format") from None


def _call_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function") or {}
    return {
        "type": "object",
        "properties": {
            "name": {"const": function.get("name")},
            "arguments": function.get("parameters") or {"type": "object"},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
