"""`/v1/responses` through the official SDK."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest

from kvclient.errors import Internal
from tests.gateway.conftest import Served
from tests.gateway.fake import done, speak

Serve = Callable[..., Served]
CALL = {"id": "call_1", "name": "weather", "arguments": '{"city": "Seoul"}'}
TOOLS: Any = [{"type": "function", "name": "weather", "description": "d", "parameters": {"type": "object"}}]


def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=20)


def answer(body: Any, model: str) -> Any:
    yield "progress", {"done": 30, "total": 40, "cached": 30}
    yield "reasoning", {"text": "hm", "index": 0}
    yield "text", {"text": "Let me ", "index": 0}
    yield "text", {"text": "look.", "index": 0}
    yield "tool_call", {"index": 0, "call": CALL}
    yield "finish", {"index": 0, "finish_reason": "tool_calls"}
    yield done("Let me look.", "tool_calls", reasoning="hm", tool_calls=[CALL])


def test_a_response_has_text_and_usage(serve: Serve) -> None:
    reply = client(serve()).responses.create(model="demo", input="Hi", instructions="S", max_output_tokens=9)
    assert reply.output_text == "Hello there" and reply.status == "completed"
    assert reply.usage is not None and reply.usage.input_tokens_details.cached_tokens == 30
    assert (reply.instructions, reply.max_output_tokens) == ("S", 9)


def test_a_stream_ends_with_the_response_that_a_plain_call_gives(serve: Serve) -> None:
    sdk = client(serve(answer))
    whole = sdk.responses.create(model="demo", input="Hi", tools=TOOLS)
    with sdk.responses.stream(model="demo", input="Hi", tools=TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    plain = {"id", "parsed", "parsed_arguments"}

    def outline(items: Any) -> Any:
        return [{k: v for k, v in item.to_dict().items() if k not in plain} for item in items]

    for left, right in zip(outline(whole.output), outline(final.output), strict=True):
        left.pop("content", None), right.pop("content", None)
        assert left == right
    assert final.output_text == whole.output_text == "Let me look."
    assert final.usage == whole.usage
    numbers = [event.sequence_number for event in events]  # type: ignore[union-attr]
    assert numbers == sorted(set(numbers))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    for kind in ("response.reasoning_text.delta", "response.function_call_arguments.done", "response.output_item.done"):
        assert kind in kinds


def test_items_become_messages_with_calls_and_results(serve: Serve) -> None:
    served = serve()
    items: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "m", "status": "completed",
         "content": [{"type": "output_text", "text": "look", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    ]  # fmt: skip
    client(served).responses.create(
        model="demo", input=items, tools=TOOLS, tool_choice={"type": "function", "name": "weather"}
    )
    asked = served.daemon.asked[0]
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    assert asked["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "look", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    assert asked["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert asked["tools"][0]["function"]["name"] == "weather"


def test_structured_output_is_parsed_by_the_sdk(serve: Serve) -> None:
    from pydantic import BaseModel

    class Point(BaseModel):
        x: int

    served = serve(lambda body, model: speak('{"x": 3}'))
    reply = client(served).responses.parse(model="demo", input="Hi", text_format=Point)
    assert reply.output_parsed == Point(x=3)
    assert served.daemon.asked[0]["response_format"]["type"] == "json_schema"


def test_fields_without_a_meaning_here_are_named_and_those_that_the_reply_repeats_are_not(serve: Serve) -> None:
    reply = client(serve()).responses.create(
        model="demo", input="Hi", parallel_tool_calls=False, prompt_cache_key="k", metadata={"a": "b"}, user="me",
        store=False, include=["reasoning.encrypted_content"],
    ).to_dict()  # fmt: skip
    assert reply["metadata"] == {"a": "b"} and reply["user"] == "me"
    assert reply["kvd"]["ignored"] == ["parallel_tool_calls", "prompt_cache_key", "store"]  # type: ignore[index]


def test_tools_that_only_the_apis_own_models_know_are_left_out_beside_functions_and_named(serve: Serve) -> None:
    served = serve()
    tools: Any = [
        {"type": "function", "name": "exec", "parameters": {"type": "object"}, "strict": False},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "web_search"}, {"type": "namespace", "name": "mcp", "tools": []},
    ]  # fmt: skip
    sdk = client(served)
    reply: Any = sdk.responses.create(model="demo", input="Hi", tools=tools)
    assert [tool["function"]["name"] for tool in served.daemon.asked[0]["tools"]] == ["exec"]
    assert reply.kvd["ignored"] == ["tools[1] (custom)", "tools[2] (web_search)", "tools[3] (namespace)"]
    with pytest.raises(openai.BadRequestError, match="'web_search'|not among the tools"):
        sdk.responses.create(model="demo", input="Hi", tools=tools, tool_choice={"type": "web_search"})
    with pytest.raises(openai.BadRequestError, match="'web_search'"):
        sdk.responses.create(model="demo", input="Hi", tools=tools[2:])


def test_a_limit_out_of_range_is_refused_by_the_name_that_was_sent(serve: Serve) -> None:
    with pytest.raises(openai.BadRequestError, match="max_output_tokens must be") as caught:
        client(serve()).responses.create(model="demo", input="Hi", max_output_tokens=0)
    assert caught.value.param == "max_output_tokens"


def test_a_cut_answer_is_incomplete(serve: Serve) -> None:
    sdk = client(serve(lambda body, model: speak("a", reason="length")))
    reply = sdk.responses.create(model="demo", input="Hi")
    assert reply.status == "incomplete" and reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert reply.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert [e.type for e in sdk.responses.create(model="demo", input="Hi", stream=True)][-1] == "response.incomplete"


def test_a_failure_after_the_first_token_is_a_failed_response(serve: Serve) -> None:
    sdk = client(serve(lambda body, model: [("text", {"text": "a", "index": 0}), Internal("the worker died")]))
    last: Any = list(sdk.responses.create(model="demo", input="Hi", stream=True))[-1]
    assert last.type == "response.failed" and "the worker died" in last.response.error.message


@pytest.mark.parametrize(
    "change",
    [
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"tools": [{"type": "web_search"}]},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": []},
        {"truncation": "sometimes"},
    ],
)
def test_what_cannot_be_served_is_refused(serve: Serve, change: Any) -> None:
    served = serve()
    with pytest.raises(openai.BadRequestError):
        client(served).responses.create(**{"model": "demo", "input": "Hi", **change})
    assert served.daemon.asked == []
