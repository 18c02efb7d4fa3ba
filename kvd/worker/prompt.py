"""From a request's body to token ids: template, tokenizer, limits. Runs in preparation threads, away from MLX."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import jinja2
from transformers.utils import chat_template_utils

from kvclient.errors import BadRequest, ContextLengthExceeded
from kvd.cache.chain import common_prefix
from kvd.worker import advice
from kvd.worker.grammar import Grammar, Grammars
from kvd.worker.params import Params, Sampling, parse
from kvd.worker.text import PLAIN, Format, format_of
from kvd.worker.tools import END, START, chosen, described

_CONTINUATIONS: Final = ("A", "zq", "\n1")
"""what may follow a warmed text: tokens that all of these leave alone belong to the text"""
LONG: Final = 16
"""characters per token of the context: of a longer text the beginning is encoded first, since encoding takes memory of
a hundred times the text"""
NEVER: Final = -1e4
"""a bias that no logit outweighs, and that float16 can hold"""
_REMEDY: Final = "shorten it, or ask a model with a longer context"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request ready for the engine. `tokens` are valid ids. `excess`: they are more than the context has rows."""

    tokens: tuple[int, ...]
    params: Params
    format: Format
    excess: ContextLengthExceeded | None = None
    grammar: Grammar | None = None
    """what the answer must follow; each choice takes a copy"""
    rules: tuple[Mapping[str, Any], ...] = ()
    """of an `explain`: rules for volatile text that would help, see `kvd.worker.advice`"""


class Prompter:
    """Owns what is needed to read prompts of one model. Thread-safe: it keeps no state between calls."""

    def __init__(self, tokenizer: Any, *, vocab: int, context: int, today: datetime.date) -> None:
        """`vocab` ids the model embeds, `context` tokens, `today` what templates are told the date is (pinned: a date
        that moves would end every prefix at its position)."""
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._context = context
        self._grammars = Grammars(tokenizer, vocab)
        pin_clock(today)

    def prepare(self, kind: str, body: Mapping[str, Any]) -> Prompt:
        """Raises BadRequest naming the field, or what the template said."""
        params, body = parse(kind, body, vocab=self._vocab, random_seed=int.from_bytes(os.urandom(7), "big"))
        tools = body.get("tools", [])
        called = tools if params.tool_choice != "none" else []
        open_end = body.get("open_end", False)
        rules: tuple[Mapping[str, Any], ...] = ()
        if "tokens" in body:
            tokens = body["tokens"]
        elif "prompt" in body:
            tokens = self._read(open_end, body["prompt"])
        else:
            messages, options = [_message(message) for message in body["messages"]], _template_options(body)
            tokens = self._chat(open_end, messages, tools, options)
            if kind == "explain":
                read = partial(self._chat, open_end, tools=tools, options=options)
                rules = advice.rules(messages, lambda other: read([dict(message) for message in other]))
        self._check(tokens)
        room = self._context - len(tokens) + 1
        sampling, grammar = params.sampling, self._grammar(params, called)
        if kind == "generate" and grammar is None and tools and not called:
            sampling, grammar = self._without_calls(sampling)
        return Prompt(
            tokens=tuple(tokens),
            params=replace(params, max_tokens=min(params.max_tokens, room), sampling=sampling),
            format=format_of(self._tokenizer, called, tokens) if "messages" in body else PLAIN,
            excess=_excess(len(tokens), self._context) if room < 1 else None,
            grammar=grammar,
            rules=rules,
        )

    def _without_calls(self, sampling: Sampling) -> tuple[Sampling, Grammar | None]:
        """`tool_choice` "none": the tools stay in the prompt, which shares its prefix with the turns before, and what
        opens a call is never drawn: one token by its bias, which costs nothing, several by a grammar."""
        start = self._tokenizer.tool_call_start or START
        opening = self._tokenizer.encode(start, add_special_tokens=False)
        if len(opening) > 1:
            return sampling, self._grammars.of_text(start)
        bias = dict(sampling.logit_bias) | {opening[0]: NEVER}
        return replace(sampling, logit_bias=tuple(sorted(bias.items()))), None

    def _grammar(self, params: Params, tools: Sequence[Mapping[str, Any]]) -> Grammar | None:
        forced = chosen(tools, params.tool_choice)
        if forced and params.response_format is not None:
            raise BadRequest("response_format and a forced tool_choice exclude each other", field="tool_choice")
        if forced:
            kind = self._tokenizer.init_kwargs.get("tool_parser_type")
            if self._tokenizer.has_tool_calling and kind != "json_tools":
                raise BadRequest(f"tool_choice cannot be forced in this model's format ({kind})", field="tool_choice")
            return self._grammars.of_call(forced, START, END)
        return self._grammars.of_format(params.response_format) if params.response_format is not None else None

    def _check(self, tokens: Sequence[int]) -> None:
        if not tokens:
            raise BadRequest("the prompt is empty")
        if max(tokens) >= self._vocab or min(tokens) < 0:
            bad = next(token for token in tokens if not 0 <= token < self._vocab)
            raise BadRequest(f"token id {bad} is not within 0 and {self._vocab - 1}", value=bad, vocab=self._vocab)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        """special: begin with what the tokenizer puts before a text. Raises ContextLengthExceeded for one that is far
        beyond the context."""
        head = LONG * self._context
        if len(text) > head and (found := len(self._tokenizer.encode(text[:head]))) > 2 * self._context:
            raise ContextLengthExceeded(
                f"the prompt has {len(text)} characters, of which the first {head} are {found} tokens, and the model's "
                f"limit is {self._context} tokens; {_REMEDY}",
                prompt=found, limit=self._context, reusable_prefix=0,
            )  # fmt: skip
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        return ids

    def _encode_raw(self, text: str) -> list[int]:
        bos = self._tokenizer.bos_token
        return self._encode(text, special=not (bos and text.startswith(bos)))

    def _read(self, open_end: bool, text: str) -> list[int]:
        if not open_end:
            return self._encode_raw(text)
        return _shared([self._encode_raw(text + more) for more in _CONTINUATIONS])

    def _chat(
        self,
        open_end: bool,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> list[int]:
        if not self._tokenizer.has_chat_template:
            raise BadRequest("this model has no chat template: send prompt or tokens instead of messages")
        if open_end and messages and messages[-1]["role"] == "user":
            # What is asked later continues this message, so the template's closing tags are no part of the prefix.
            *before, last = messages
            variants = [[*before, {**last, "content": last["content"] + more}] for more in _CONTINUATIONS]
            return _shared([self._render(variant, tools, options) for variant in variants])
        return self._render(messages, tools, options)

    def _render(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> list[int]:
        settings = {"add_generation_prompt": True, **options}
        if not self._tokenizer.has_tool_calling and (tools or any(message["role"] == "tool" for message in messages)):
            messages, tools = described(messages, tools), ()
        try:
            text = self._tokenizer.apply_chat_template(messages, tools=list(tools) or None, tokenize=False, **settings)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as problem:
            raise BadRequest(f"the chat template refuses these messages: {problem}", field="messages") from problem
        return self._encode(text, special=False)


def pin_clock(day: datetime.date) -> None:
    """Make it `day` for all chat templates of this process (a worker has one model). Templates cannot be handed a clock
    of their own: transformers turns callables among their variables into text."""

    class Pinned(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Pinned:
            return cls(day.year, day.month, day.day, tzinfo=tz)

    vars(chat_template_utils)["datetime"] = Pinned


def _excess(prompt: int, limit: int) -> ContextLengthExceeded:
    """reusable_prefix is for the engine to fill in: only it knows what is cached."""
    return ContextLengthExceeded(
        f"the prompt has {prompt} tokens, the model's limit is {limit}; {_REMEDY}",
        prompt=prompt, limit=limit, reusable_prefix=0,
    )  # fmt: skip


def _shared(variants: Sequence[Sequence[int]]) -> list[int]:
    first = list(variants[0])
    return first[: min(common_prefix(first, other) for other in variants[1:])]


def _message(value: Mapping[str, Any]) -> dict[str, Any]:
    """One message as templates want it: text content, tool arguments as objects."""
    message = {**value, "content": _content(value.get("content"))}
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _content(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in value]
        if all(isinstance(part, str) for part in parts):
            return "".join(part for part in parts if part is not None)
    raise BadRequest("the content of a message is text or a list of text parts", field="messages")


def _call(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("function"), dict):
        raise BadRequest("a tool call is an object with a function", field="messages")
    function = dict(value["function"])
    if isinstance(function.get("arguments"), str):
        function["arguments"] = _arguments(function["arguments"] or "{}")
    return {**value, "function": function}


def _arguments(text: str) -> dict[str, Any]:
    """An object, as templates want it. What is none, such as a call that was cut, is kept as text: refused, it would
    end the conversation that it is part of."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"arguments": text}


def _template_options(body: Mapping[str, Any]) -> Mapping[str, Any]:
    options: Mapping[str, Any] = body.get("template_kwargs", {})
    reserved = sorted(set(options) & {"tokenize", "return_dict", "chat_template", "tools"})
    if reserved:
        raise BadRequest(f"template_kwargs must not set {reserved[0]}", field="template_kwargs")
    return options
