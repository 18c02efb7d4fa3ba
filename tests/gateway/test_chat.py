"""`/v1/chat/completions` through the official SDK."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from tests.gateway.conftest import Served
from tests.gateway.fake import STATS, done, speak

Serve = Callable[..., Served]
HELLO: Any = [{"role": "user", "content": "Hi"}]


def client(served: Served, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=20, **options)


def test_an_answer_has_text_usage_and_cached_tokens(serve: Serve) -> None:
    served = serve()
    reply = client(served).chat.completions.create(model="demo", messages=HELLO)
    assert reply.choices[0].message.content == "Hello there"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (40, 3, 43)
    assert reply.usage.prompt_tokens_details.cached_tokens == 30
    assert reply.model_extra is not None and reply.model_extra["kvd"]["stats"] == STATS


def test_a_stream_joins_to_the_same_text_and_ends_with_usage(serve: Serve) -> None:
    served = serve()
    chunks = list(
        client(served).chat.completions.create(
            model="demo", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello there"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 30  # type: ignore[union-attr]
    assert all(c.usage is None for c in chunks[:-1])


def test_the_finish_reason_goes_out_before_the_commit_and_only_usage_waits(serve: Serve) -> None:
    committed = threading.Event()

    def script(body: Any, model: str) -> Any:
        yield "text", {"text": "yes", "index": 0}
        yield "finish", {"index": 0, "finish_reason": "stop"}
        yield committed
        yield done("yes")

    served = serve(script)
    stream = client(served).chat.completions.create(
        model="demo", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    seen = []
    for chunk in stream:
        seen.append(chunk)
        if chunk.choices and chunk.choices[0].finish_reason == "stop":
            assert not committed.is_set()
            committed.set()
    assert seen[-1].usage is not None


def test_without_usage_the_stream_is_complete_before_the_commit_and_the_request_still_runs_to_its_end(
    serve: Serve,
) -> None:
    committed = threading.Event()

    def script(body: Any, model: str) -> Any:
        yield "text", {"text": "yes", "index": 0}
        yield "finish", {"index": 0, "finish_reason": "stop"}
        yield committed
        yield done("yes")

    served = serve(script)
    with client(served) as sdk:
        chunks = list(sdk.chat.completions.create(model="demo", messages=HELLO, stream=True))
        assert chunks[-1].choices[0].finish_reason == "stop"
    committed.set()
    assert httpx.get(served.url + "/healthz").status_code == 200
    assert served.daemon.cancelled == []


def test_a_client_that_goes_away_cancels_its_request(serve: Serve) -> None:
    never = threading.Event()

    def script(body: Any, model: str) -> Any:
        yield "text", {"text": "begin", "index": 0}
        yield never

    served = serve(script)
    stream = client(served).chat.completions.create(model="demo", messages=HELLO, stream=True)
    next(iter(stream))
    stream.close()
    assert served.daemon.cancel_seen.wait(10)


def test_a_client_that_goes_away_while_it_waits_for_a_whole_answer_cancels_too(serve: Serve) -> None:
    never = threading.Event()

    def script(body: Any, model: str) -> Any:
        yield "progress", {"done": 1, "total": 40, "cached": 0}
        yield never

    served = serve(script)
    with pytest.raises(openai.APITimeoutError):
        client(served).with_options(timeout=0.5).chat.completions.create(model="demo", messages=HELLO)
    assert served.daemon.cancel_seen.wait(10)


def test_prefill_sends_comments_that_sdks_skip(serve: Serve) -> None:
    served = serve()
    body = {"model": "demo", "messages": HELLO, "stream": True}
    with httpx.stream("POST", served.url + "/v1/chat/completions", json=body, timeout=20) as reply:
        text = reply.read().decode()
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert ": prefill 30/40 cached 30\n\n" in text
    assert text.endswith("data: [DONE]\n\n")


def test_tool_calls_come_whole_and_streamed_alike(serve: Serve) -> None:
    call = {"id": "call_1", "name": "weather", "arguments": '{"city": "Seoul"}'}

    def script(body: Any, model: str) -> Any:
        yield "text", {"text": "Let me look.", "index": 0}
        yield "tool_call", {"index": 0, "call": call}
        yield "tool_call", {"index": 0, "call": {**call, "id": "call_2"}}
        yield "finish", {"index": 0, "finish_reason": "tool_calls"}
        yield done("Let me look.", "tool_calls", tool_calls=[call, {**call, "id": "call_2"}])

    served = serve(script)
    sdk = client(served)
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    reply = sdk.chat.completions.create(model="demo", messages=HELLO, tools=tools, tool_choice=choice)
    calls = reply.choices[0].message.tool_calls
    assert calls is not None and [c.id for c in calls] == ["call_1", "call_2"]
    assert reply.choices[0].finish_reason == "tool_calls"
    assert served.daemon.asked[0]["tools"] == tools and served.daemon.asked[0]["tool_choice"] == choice
    with sdk.chat.completions.stream(model="demo", messages=HELLO, tools=tools) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion().choices[0]
    assert [c.to_dict()["function"] for c in final.message.tool_calls or ()] != []
    assert [json.loads(c.function.arguments) for c in final.message.tool_calls or ()] == [{"city": "Seoul"}] * 2
    assert final.message.content == "Let me look." and final.finish_reason == "tool_calls"


def test_history_with_tool_calls_and_parts_reaches_the_daemon_as_text_messages(serve: Serve) -> None:
    served = serve()
    messages: Any = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant", "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    client(served).chat.completions.create(model="demo", messages=messages)
    assert served.daemon.asked[0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant", "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
    ]


def test_reasoning_is_apart_from_text_streamed_or_not(serve: Serve) -> None:
    def script(body: Any, model: str) -> Any:
        yield "reasoning", {"text": "hm ", "index": 0}
        yield "reasoning", {"text": "so", "index": 0}
        yield "text", {"text": "42", "index": 0}
        yield "finish", {"index": 0, "finish_reason": "stop"}
        yield done("42", reasoning="hm so")

    sdk = client(serve(script))
    whole: Any = sdk.chat.completions.create(model="demo", messages=HELLO).choices[0].message
    assert (whole.content, whole.reasoning_content) == ("42", "hm so")
    chunks: Any = list(sdk.chat.completions.create(model="demo", messages=HELLO, stream=True))
    assert "".join(getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in chunks) == "hm so"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "42"


def test_options_reach_the_daemon_under_its_names(serve: Serve) -> None:
    served = serve()
    client(served).chat.completions.create(
        model="demo", messages=HELLO, temperature=0.5, top_p=0.9, seed=7, stop="END", max_completion_tokens=5,
        presence_penalty=0.1, frequency_penalty=0.2, logit_bias={"5": -100}, user="me", reasoning_effort="low",
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        extra_body={"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "cache": "read", "priority": "background"},
    )  # fmt: skip
    asked = served.daemon.asked[0]
    assert asked.pop("messages") == [{"role": "user", "content": "Hi"}]
    assert asked == {
        "temperature": 0.5, "top_p": 0.9, "seed": 7, "stop": ["END"], "max_tokens": 5, "presence_penalty": 0.1,
        "frequency_penalty": 0.2, "logit_bias": {"5": -100.0}, "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1,
        "cache": "read", "priority": "background", "template_kwargs": {"reasoning_effort": "low"},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
    }  # fmt: skip


@pytest.mark.parametrize(("given", "taken"), [(7, 7), (-1, 2**64 - 1), (-(2**63), 2**63)])
def test_a_seed_may_be_negative_as_openais_may(serve: Serve, given: int, taken: int) -> None:
    served = serve()
    client(served).chat.completions.create(model="demo", messages=HELLO, temperature=1, seed=given)
    assert served.daemon.asked[0]["seed"] == taken


def test_structured_output_is_parsed_by_the_sdk(serve: Serve) -> None:
    from pydantic import BaseModel

    class Point(BaseModel):
        x: int

    served = serve(lambda body, model: speak('{"x": 3}'))
    reply = client(served).chat.completions.parse(model="demo", messages=HELLO, response_format=Point)
    assert reply.choices[0].message.parsed == Point(x=3)
    assert served.daemon.asked[0]["response_format"]["json_schema"]["schema"]["properties"]["x"]["type"] == "integer"


def test_logprobs_hold_tokens_bytes_and_alternatives(serve: Serve) -> None:
    one = {"id": 5, "token": "é", "logprob": -0.5, "top": [{"id": 6, "token": "\ufffd", "logprob": -0.5}]}

    def script(body: Any, model: str) -> Any:
        assert body["logprobs"] is True and body["top_logprobs"] == 1
        yield "text", {"text": "é", "index": 0, "logprobs": [one]}
        yield "finish", {"index": 0, "finish_reason": "stop"}
        yield done("é")

    sdk = client(serve(script))
    whole = sdk.chat.completions.create(model="demo", messages=HELLO, logprobs=True, top_logprobs=1).choices[0]
    assert whole.logprobs is not None and whole.logprobs.content is not None
    token = whole.logprobs.content[0]
    assert (token.token, token.logprob, token.bytes) == ("é", -0.5, [0xC3, 0xA9])
    assert (token.top_logprobs[0].token, token.top_logprobs[0].bytes) == ("\ufffd", None)  # part of a character
    chunks = list(
        sdk.chat.completions.create(model="demo", messages=HELLO, logprobs=True, top_logprobs=1, stream=True)
    )
    found = [c.choices[0].logprobs.content for c in chunks if c.choices[0].logprobs]
    assert found[0] is not None and found[0][0].token == "é"


def test_n_choices_are_told_apart(serve: Serve) -> None:
    def script(body: Any, model: str) -> Any:
        assert body["n"] == 2
        yield "text", {"text": "b", "index": 1}
        yield "text", {"text": "a", "index": 0}
        yield "finish", {"index": 1, "finish_reason": "length"}
        yield "finish", {"index": 0, "finish_reason": "stop"}
        choices = [
            {"index": 0, "text": "a", "finish_reason": "stop"}, {"index": 1, "text": "b", "finish_reason": "length"}
        ]
        yield "done", {"choices": choices, "stats": STATS}

    sdk = client(serve(script))
    whole = sdk.chat.completions.create(model="demo", messages=HELLO, n=2, temperature=1)
    assert [(c.message.content, c.finish_reason) for c in whole.choices] == [("a", "stop"), ("b", "length")]
    chunks = list(sdk.chat.completions.create(model="demo", messages=HELLO, n=2, temperature=1, stream=True))
    texts = {0: "", 1: ""}
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {0: "a", 1: "b"}


@pytest.mark.parametrize("temperature", [{}, {"temperature": 0}])
def test_choices_that_would_be_equal_are_computed_once_and_said_to_be(serve: Serve, temperature: Any) -> None:
    call = {"id": "c1", "name": "f", "arguments": "{}"}

    def script(body: Any, model: str) -> Any:
        yield "text", {"text": "a", "index": 0}
        yield "tool_call", {"index": 0, "call": call}
        yield "finish", {"index": 0, "finish_reason": "tool_calls"}
        yield done("a", "tool_calls", tool_calls=[call])

    served = serve(script)
    sdk = client(served)
    whole: Any = sdk.chat.completions.create(model="demo", messages=HELLO, n=3, **temperature)
    assert "n" not in served.daemon.asked[0] and whole.kvd["ignored"] == ["n"]
    assert [(c.index, c.message.content, len(c.message.tool_calls)) for c in whole.choices] == [
        (0, "a", 1), (1, "a", 1), (2, "a", 1)
    ]
    assert whole.usage.completion_tokens == STATS["completion_tokens"]
    chunks = list(sdk.chat.completions.create(model="demo", messages=HELLO, n=3, stream=True, **temperature))
    for index in range(3):
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert [c.delta.content for c in mine if c.delta.content] == ["a"]
        assert mine[-1].finish_reason == "tool_calls" and sum(bool(c.delta.tool_calls) for c in mine) == 2
    two = sdk.completions.create(model="demo", prompt=["x", "y"], n=2, **temperature)
    assert [(c.index, c.text) for c in two.choices] == [(0, "a"), (1, "a"), (2, "a"), (3, "a")]
