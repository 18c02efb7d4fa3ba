"""The official SDKs' usual calls on the real daemon with the demo model."""

from __future__ import annotations

import json
import threading
from typing import Any

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel

from kvclient import Client
from rig.daemon import Daemon

HELLO: Any = [{"role": "user", "content": "Name a colour."}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather", "description": "Weather of a city",
            "parameters": {
                "type": "object", "properties": {"city": {"type": "string", "enum": ["Seoul", "Oslo"]}},
                "required": ["city"], "additionalProperties": False,
            },
        },
    }
]  # fmt: skip


@pytest.fixture(scope="module")
def sdk(real_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=real_url + "/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def claude(real_url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=real_url, api_key="none", max_retries=0, timeout=120)


def ask(sdk: openai.OpenAI, **more: Any) -> Any:
    usual = {"model": "demo", "messages": HELLO, "max_tokens": 8, "temperature": 0}
    return sdk.chat.completions.create(**{**usual, **more})


def test_http_and_kvclient_give_the_same_answer_and_share_their_cache(sdk: openai.OpenAI, real_daemon: Daemon) -> None:
    with real_daemon.client() as client:
        direct = client.generate("demo", messages=HELLO, max_tokens=8, temperature=0.0)
    reply = ask(sdk)
    assert reply.choices[0].message.content == direct.text
    assert reply.usage.prompt_tokens == direct.stats.prompt_tokens
    assert reply.usage.prompt_tokens_details.cached_tokens == direct.stats.prompt_tokens - 1


def test_a_stream_joins_to_the_whole_answer_and_a_seed_repeats_it(sdk: openai.OpenAI) -> None:
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_tokens": 12}
    whole = ask(sdk, **drawn).choices[0]
    chunks = list(ask(sdk, **drawn, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.message.content
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "length"


def test_a_tool_is_called_whole_and_streamed_alike(sdk: openai.OpenAI) -> None:
    named: Any = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 60}
    whole = ask(sdk, **named).choices[0]
    call = whole.message.tool_calls[0].function
    assert call.name == "weather" and json.loads(call.arguments)["city"] in ("Seoul", "Oslo")
    assert whole.finish_reason == "tool_calls"
    with sdk.chat.completions.stream(model="demo", messages=HELLO, temperature=0, **named) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0]
    assert streamed.message.tool_calls is not None
    assert streamed.message.tool_calls[0].function.arguments == call.arguments
    assert streamed.finish_reason == "tool_calls"


def test_structured_output_fits_its_schema(sdk: openai.OpenAI) -> None:
    class Point(BaseModel):
        x: bool
        y: bool

    reply = sdk.chat.completions.parse(
        model="demo", messages=HELLO, response_format=Point, max_tokens=40, temperature=0
    )
    assert isinstance(reply.choices[0].message.parsed, Point)


def test_logprobs_choices_and_stops_work_through_http(sdk: openai.OpenAI) -> None:
    reply = ask(sdk, n=2, temperature=0.5, seed=3, logprobs=True, top_logprobs=3, max_tokens=4)
    assert [choice.index for choice in reply.choices] == [0, 1]
    for choice in reply.choices:
        if all(token.bytes is not None for token in choice.logprobs.content):
            assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
        assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in choice.logprobs.content)
    text = ask(sdk).choices[0].message.content
    word = text.split()[-1]
    assert word not in ask(sdk, stop=[word]).choices[0].message.content


def test_anthropics_messages_and_their_count_agree(claude: anthropic.Anthropic) -> None:
    shared: Any = {"model": "demo", "messages": HELLO, "system": "Answer with one word."}
    counted = claude.messages.count_tokens(**shared).input_tokens
    first = claude.messages.create(max_tokens=6, **shared)
    usage = first.usage
    parts = (usage.input_tokens, usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0)
    assert sum(parts) == counted and usage.output_tokens > 0
    with claude.messages.stream(max_tokens=6, **shared) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == first.content[0].text  # type: ignore[union-attr]
    assert final.usage.cache_read_input_tokens == counted - 1
    assert final.stop_reason == first.stop_reason


def test_an_answer_that_anthropics_client_began_goes_on_where_it_stopped(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(model="demo", max_tokens=8, messages=HELLO).content[0].text  # type: ignore[union-attr]
    begun: Any = [*HELLO, {"role": "assistant", "content": whole[:len(whole) // 2].rsplit(" ", 1)[0]}]
    rest = claude.messages.create(model="demo", max_tokens=8, messages=begun).content[0].text  # type: ignore[union-attr]
    assert (begun[-1]["content"] + rest).startswith(whole)


def test_anthropics_stop_sequences_are_named(claude: anthropic.Anthropic) -> None:
    reply = claude.messages.create(model="demo", max_tokens=30, messages=HELLO, stop_sequences=["a", "e"])
    assert reply.stop_reason == "stop_sequence" and reply.stop_sequence in ("a", "e")


def test_anthropics_tools_are_called(claude: anthropic.Anthropic) -> None:
    function = TOOLS[0]["function"]
    tools: Any = [{"name": "weather", "description": "d", "input_schema": function["parameters"]}]
    reply = claude.messages.create(
        model="demo", max_tokens=60, messages=HELLO, tools=tools, tool_choice={"type": "tool", "name": "weather"}
    )
    assert reply.stop_reason == "tool_use"
    assert reply.content[-1].input["city"] in ("Seoul", "Oslo")  # type: ignore[union-attr]


def test_responses_and_completions_answer(sdk: openai.OpenAI) -> None:
    reply = sdk.responses.create(model="demo", input="Name a colour.", max_output_tokens=8, temperature=0)
    assert reply.output_text == ask(sdk).choices[0].message.content
    assert sdk.completions.create(model="demo", prompt="Once upon a", max_tokens=3).choices[0].text


def test_a_prompt_over_the_context_says_both_numbers_in_both_shapes(
    sdk: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    messages: Any = [{"role": "user", "content": "word " * 9000}]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(sdk, messages=messages, stream=True)
    error: Any = caught.value.body
    assert error["code"] == "context_length_exceeded"
    assert error["details"]["prompt"] > error["details"]["limit"] == 8192
    with pytest.raises(anthropic.BadRequestError, match="8192"):
        claude.messages.create(model="demo", max_tokens=5, messages=messages)


def test_explain_names_the_rule_that_would_help_and_what_it_saves(real_daemon: Daemon) -> None:
    system = "You are an agent.\nToday's date: 2026-02-03\n" + "Change as little as you can. " * 20
    messages: Any = [{"role": "system", "content": system}, *HELLO]
    with real_daemon.client() as client:
        (rule,) = client.explain("demo", messages=messages)["rules"]
        assert rule["name"] == "date" and rule["saved_tokens"] > 100
        assert client.explain("demo", messages=HELLO)["rules"] == []


def test_an_abort_stops_the_work_and_its_rows_are_kept(sdk: openai.OpenAI, real_daemon: Daemon) -> None:
    stream = ask(sdk, max_tokens=4000, stream=True)
    next(iter(stream))
    stream.close()
    with real_daemon.client() as client:
        assert ended(client), client.status()["requests"]


def ended(client: Client) -> bool:
    """True once no request is live."""
    quiet = threading.Event()
    for _ in range(200):
        if not client.status()["requests"]:
            return True
        quiet.wait(0.05)
    return False


def test_metrics_and_page_data_show_what_was_reused(real_url: str) -> None:
    text = httpx.get(real_url + "/metrics").text
    for name in ('kvd_prompt_tokens_total{source="cached_memory"}', "kvd_up 1.0", "kvd_model_pool_bytes"):
        assert name in text, name
    data = httpx.get(real_url + "/page/data").json()
    assert data["recent"] and data["status"]["models"][0]["name"] == "demo"
    assert httpx.get(real_url + "/page/prefixes").status_code == 200
