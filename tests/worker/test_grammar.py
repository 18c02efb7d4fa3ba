"""Answers keep the shape that was asked for, and tools work with models that know none."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from kvclient.errors import BadRequest
from kvd.worker.tools import START
from tests.worker.rig import Rig

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
        "additionalProperties": False,
    }}}
    for name in ("weather", "time")
]  # fmt: skip
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig() as rig:
        yield rig


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_random_model_answers_within_the_schema(rig: Rig, temperature: float) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    options = {"messages": HELLO, "response_format": shape, "temperature": temperature, "seed": 3, "max_tokens": 200}
    answer = rig.send(n=3, **options).end()
    for choice in answer.body["choices"]:
        assert choice["finish_reason"] == "stop"
        person = json.loads(choice["text"])
        assert person["name"] in ("ada", "bob")
        assert 0 <= person["age"] <= 99


def test_a_grammar_goes_on_after_a_preemption() -> None:
    shape = {"type": "json_schema", "json_schema": {"schema": {
        "type": "array", "items": {"enum": ["people", "water"]}, "minItems": 20, "maxItems": 20,
    }}}  # fmt: skip
    options = {"messages": HELLO, "response_format": shape, "max_tokens": 200}
    with Rig() as rig:
        alone = rig.send(**options).end().text
    with Rig(pool_blocks=20) as rig:
        answers = [rig.send(**options, salt=str(n)) for n in range(3)]
        assert [answer.end().text for answer in answers] == [alone] * 3
        assert sum(answer.stats["recomputed_tokens"] for answer in answers) > 0
    assert len(json.loads(alone)) == 20


def test_json_object_is_some_object(rig: Rig) -> None:
    answer = rig.send(messages=HELLO, response_format={"type": "json_object"}, max_tokens=60, temperature=0.0).end()
    assert answer.text.startswith("{")
    if answer.body["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(answer.text), dict)


def test_a_schema_that_is_none_is_refused(rig: Rig) -> None:
    shape = {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}
    with pytest.raises(BadRequest, match="response_format"):
        rig.prompter.prepare("generate", {"messages": HELLO, "response_format": shape})


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time"}}])
def test_a_forced_tool_is_called_with_arguments_of_its_schema(rig: Rig, choice: Any) -> None:
    answer = rig.send(messages=HELLO, tools=TOOLS, tool_choice=choice, max_tokens=100).end()
    body = answer.body["choices"][0]
    assert body["finish_reason"] == "tool_calls"
    (call,) = body["tool_calls"]
    assert call["name"] in (("weather", "time") if choice == "required" else ("time",))
    assert json.loads(call["arguments"])["city"] in ("Rome", "Oslo")
    assert [kind for kind, _ in answer.events if kind == "tool_call"] == ["tool_call"]


def test_a_tool_that_was_not_given_cannot_be_forced(rig: Rig) -> None:
    with pytest.raises(BadRequest, match="nope"):
        rig.prompter.prepare("generate", {"messages": HELLO, "tools": TOOLS, "tool_choice": {"name": "nope"}})


def test_tools_are_described_to_a_model_without_a_tool_template_and_results_come_back_as_text(rig: Rig) -> None:
    history = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]  # fmt: skip
    first = rig.prompter.prepare("generate", {"messages": HELLO, "tools": TOOLS}).tokens
    text = rig.tokenizer.decode(rig.prompter.prepare("generate", {"messages": history, "tools": TOOLS}).tokens)
    assert '"name": "weather"' in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>' in text
    assert "<tool_response>\nsunny\n</tool_response>" in text
    assert text.startswith(rig.tokenizer.decode(first).removesuffix("<|im_start|>assistant\n"))


def test_where_no_tool_is_to_be_called_the_prompt_is_the_same_and_a_call_cannot_be_written(rig: Rig) -> None:
    asked = {"messages": HELLO, "tools": TOOLS}
    prompt = rig.prompter.prepare("generate", asked | {"tool_choice": "none"})
    assert prompt.tokens == rig.prompter.prepare("generate", asked).tokens
    assert prompt.grammar is not None and not prompt.format.tools
    for token in rig.tokenizer.encode(f"so: {START[:-1]}", add_special_tokens=False):
        prompt.grammar.accept(token)
    mask = prompt.grammar.mask(len(rig.tokenizer.get_vocab())).tolist()
    assert mask[rig.tokenizer.encode(START[-1])[-1]] == -math.inf
    assert mask[rig.tokenizer.encode("x")[-1]] == mask[rig.tokenizer.eos_token_id] == 0
    answer = rig.send(**asked, tool_choice="none", max_tokens=20).end()
    assert answer.kind == "done" and answer.body["choices"][0]["text"]


def test_where_one_token_opens_a_call_it_is_never_drawn(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"messages": HELLO, "tools": TOOLS, "max_tokens": 30, "logit_bias": {2: -100}}
    monkeypatch.setattr(rig.tokenizer, "_tool_parser", lambda text, tools: {"name": "weather", "arguments": {}})
    monkeypatch.setattr(rig.tokenizer, "_tool_call_end", "</call>")
    monkeypatch.setattr(rig.tokenizer, "_tool_call_start", "<call>")
    said = [rig.tokenizer.decode([token]) for token in rig.tokenizer.encode(rig.send(**asked).end().text)]
    start = next(text for text in said if len(rig.tokenizer.encode(text, add_special_tokens=False)) == 1)
    monkeypatch.setattr(rig.tokenizer, "_tool_call_start", start)
    called = rig.send(**asked).end().body["choices"][0]
    assert called["tool_calls"]
    body = rig.send(**asked, tool_choice="none").end().body["choices"][0]
    assert not body["tool_calls"] and body["text"] and start not in body["text"]
    assert rig.prompter.prepare("generate", asked | {"tool_choice": "none"}).grammar is None
