"""Every field of every verb: what passes, what is refused, and with which words."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvclient import fields
from kvclient.errors import BadRequest

GOOD: dict[str, Any] = {
    "prompt": "text", "tokens": [0, 5, fields.MAX_ID], "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function"}], "tool_choice": "auto", "template_kwargs": {"enable_thinking": False},
    "max_tokens": 1, "n": 2, "temperature": 0, "top_p": 0.5, "top_k": 0, "min_p": 0.1, "seed": 2**64 - 1,
    "stop": ["\n"], "repetition_penalty": 1.1, "presence_penalty": -2.0, "frequency_penalty": 2.0,
    "logit_bias": {"7": -100.0}, "logprobs": True, "top_logprobs": 20, "response_format": {"type": "json_object"},
    "timeout": 0.5, "cache": "read", "salt": "tenant", "priority": "background", "durable_wait_ms": 0,
    "pin": True, "ttl_s": 60.0, "open_end": True, "model": "demo", "kv": "k8v4", "id": "x", "drain_s": 0.0,
}  # fmt: skip
BAD: dict[str, list[Any]] = {
    "prompt": [b"bytes", 1, "lone \ud800 surrogate"], "tokens": [[], [-1], [2**31], [True], [1.0], "1,2", {1: 2}],
    "messages": [[], [{}], [{"role": ""}], [{"role": "user", "content": 1}], ["hi"], "hi", [{"role": 1}],
                 [{"role": "user", "content": ["part"]}]],
    "tools": ["x", [1], {}], "tool_choice": ["maybe", 1, ["auto"]], "template_kwargs": [[], {1: 2}],
    "max_tokens": [0, -1, 1.5, True, "5"], "n": [0, 17],
    "temperature": [-0.1, 11, math.nan, math.inf, 10**400, "1", False],
    "top_p": [-0.1, 1.1], "top_k": [-2, 1.5], "min_p": [1.1], "seed": [-1, 2**64, 0.5],
    "stop": ["", [""], [1], ["x"] * 17, 5, "x" * 1001], "repetition_penalty": [0, 11], "presence_penalty": [11],
    "frequency_penalty": [-11], "logit_bias": [{"x": 1}, {"-1": 1}, {"1": 101}, {"1": "x"}, {2**31: 0}, [1], {"²": 1}],
    "logprobs": [1, "yes"], "top_logprobs": [21, -1], "response_format": [{}, {"type": "xml"}, {"type": "json_schema"},
                 {"type": "json_schema", "json_schema": {"schema": 5}}, "json"],
    "timeout": [0, -1, math.inf, 10**400], "cache": ["no", True], "salt": ["x" * 257, 5], "priority": ["high"],
    "durable_wait_ms": [-1, 600_001, 0.5], "pin": [1], "ttl_s": [0], "open_end": ["yes"], "model": [5, "x" * 257],
    "kv": [8], "id": ["", "x" * 65], "drain_s": [-1],
}  # fmt: skip
CASES = [(verb, name) for verb, table in fields.VERBS.items() for name in table]


def body(verb: str, name: str, value: Any) -> dict[str, Any]:
    """The least body of the verb that has this field."""
    made = {need: GOOD[need] for need in fields.REQUIRED.get(verb, ())}
    if "prompt" in fields.VERBS[verb] and name not in fields.INPUT:
        made["messages"] = GOOD["messages"]
    if name == "top_logprobs":
        made["logprobs"] = True
    return {**made, name: value}


@pytest.mark.parametrize(("verb", "name"), CASES)
def test_a_good_value_passes_unchanged(verb: str, name: str) -> None:
    assert fields.checked(verb, body(verb, name, GOOD[name]))[name] == GOOD[name]


@pytest.mark.parametrize(("verb", "name"), CASES)
def test_a_bad_value_is_refused_by_its_field_name(verb: str, name: str) -> None:
    for value in BAD[name]:
        with pytest.raises(BadRequest) as refused:
            fields.checked(verb, body(verb, name, value))
        assert str(refused.value.details["field"]).startswith(name), value
        assert name in refused.value.message and "\n" not in refused.value.message


def test_an_empty_name_is_the_default_model_where_models_are_asked_for_and_none_where_one_is_changed() -> None:
    assert fields.checked("models", {"model": ""}) == {"model": ""}
    for verb in ("load", "unload"):
        with pytest.raises(BadRequest, match="not empty"):
            fields.checked(verb, {"model": ""})


@pytest.mark.parametrize("verb", fields.VERBS)
def test_an_unknown_field_is_refused_by_name(verb: str) -> None:
    with pytest.raises(BadRequest, match="temprature") as refused:
        fields.checked(verb, {"temprature": 1})
    assert refused.value.details["field"] == "temprature"


def test_an_unknown_verb_is_refused() -> None:
    with pytest.raises(BadRequest, match="frobnicate"):
        fields.checked("frobnicate", {})


@pytest.mark.parametrize("given", [{}, {"prompt": "x", "tokens": [1]}, {"prompt": "x", "messages": GOOD["messages"]}])
def test_there_is_exactly_one_input(given: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="exactly one of prompt, tokens and messages"):
        fields.checked("generate", given)


@pytest.mark.parametrize("name", ["tools", "tool_choice", "template_kwargs"])
def test_template_fields_need_messages(name: str) -> None:
    with pytest.raises(BadRequest, match=f"{name} needs messages"):
        fields.checked("generate", {"prompt": "x", name: GOOD[name]})


@pytest.mark.parametrize(("verb", "name"), [(verb, name) for verb, names in fields.REQUIRED.items() for name in names])
def test_a_missing_field_is_named(verb: str, name: str) -> None:
    with pytest.raises(BadRequest, match=f"{verb} needs {name}"):
        fields.checked(verb, {})


def test_an_empty_prompt_is_a_prompt() -> None:
    assert fields.checked("generate", {"prompt": ""}) == {"prompt": ""}


def test_none_means_not_given() -> None:
    assert fields.checked("generate", {"prompt": "x", "seed": None, "tools": None}) == {"prompt": "x"}


def test_values_take_their_one_form_on_the_wire() -> None:
    made = fields.checked("generate", {"prompt": "x", "stop": "end", "logit_bias": {5: 1, "007": -1}, "temperature": 1})
    assert made == {"prompt": "x", "stop": ["end"], "logit_bias": {"5": 1.0, "7": -1.0}, "temperature": 1.0}
    assert type(made["temperature"]) is float
    assert fields.checked("generate", made) == made


def test_top_logprobs_need_logprobs() -> None:
    with pytest.raises(BadRequest, match="needs logprobs"):
        fields.checked("generate", {"prompt": "x", "top_logprobs": 3})
    assert fields.checked("generate", {"prompt": "x", "top_logprobs": 0})["top_logprobs"] == 0


def test_messages_errors_do_not_repeat_what_the_user_wrote() -> None:
    with pytest.raises(BadRequest) as refused:
        fields.checked("generate", {"messages": [{"role": "user", "content": {"secret": "ANANAS"}}]})
    assert "ANANAS" not in refused.value.message


def test_options_and_the_table_name_the_same_fields() -> None:
    assert set(fields.Options.__annotations__) | {"prompt"} == set(fields.VERBS["generate"])


def test_cache_knows_its_verbs() -> None:
    assert fields.checked("cache", {"verb": "ls", "model": "demo"}) == {"verb": "ls", "model": "demo"}
    with pytest.raises(BadRequest, match="verb must be one of"):
        fields.checked("cache", {"verb": "explode"})


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=3),
    max_leaves=8,
)


@given(verb=st.sampled_from([*fields.VERBS, "cache"]), data=st.data())
def test_garbage_is_refused_or_passes_and_nothing_else_happens(verb: str, data: st.DataObject) -> None:
    names = st.sampled_from(sorted(GOOD)) | st.text(max_size=8)
    body = data.draw(st.dictionaries(names, ANYTHING, max_size=4))
    try:
        once = fields.checked(verb, body)
    except BadRequest:
        return
    assert fields.checked(verb, once) == once
