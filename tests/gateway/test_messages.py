"""`/v1/messages` and `count_tokens` through the official SDK."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import pytest

from kvclient.errors import Busy, ContextLengthExceeded
from tests.gateway.conftest import Served
from tests.gateway.fake import STATS, done, speak

Serve = Callable[..., Served]
HELLO: Any = [{"role": "user", "content": "Hi"}]
CALL = {"id": "call_1", "name": "weather", "arguments": '{"city": "Seoul"}'}
TOOLS: Any = [{"name": "weather", "description": "d", "input_schema": {"type": "object"}}]


def client(served: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=20)


def answer(body: Any, model: str) -> Any:
    """Thinking, text, a call."""
    yield "progress", {"done": 30, "total": 40, "cached": 30}
    yield "reasoning", {"text": "hm", "index": 0}
    yield "text", {"text": "Let me ", "index": 0}
    yield "text", {"text": "look.", "index": 0}
    yield "tool_call", {"index": 0, "call": CALL}
    yield "finish", {"index": 0, "finish_reason": "tool_calls"}
    yield done("Let me look.", "tool_calls", reasoning="hm", tool_calls=[CALL])


def test_an_answer_has_blocks_and_three_parts_of_usage_that_add_up(serve: Serve) -> None:
    reply = client(serve(answer)).messages.create(model="demo", max_tokens=9, messages=HELLO, tools=TOOLS)
    assert [block.type for block in reply.content] == ["thinking", "text", "tool_use"]
    assert reply.content[2].input == {"city": "Seoul"}  # type: ignore[union-attr]
    assert reply.stop_reason == "tool_use"
    usage = reply.usage
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens, usage.input_tokens) == (30, 10, 0)
    assert usage.output_tokens == 3


def test_a_stream_gathers_to_the_same_message(serve: Serve) -> None:
    sdk = client(serve(answer))
    whole = sdk.messages.create(model="demo", max_tokens=9, messages=HELLO, tools=TOOLS)
    with sdk.messages.stream(model="demo", max_tokens=9, messages=HELLO, tools=TOOLS) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "Let me look."
    strip = {"id", "parsed_output", "caller", "usage", "kvd"}
    assert [b.model_dump(exclude=strip) for b in final.content] == [b.model_dump(exclude=strip) for b in whole.content]
    assert final.stop_reason == whole.stop_reason
    for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "output_tokens"):
        assert getattr(final.usage, name) == getattr(whole.usage, name), name


def test_events_come_in_the_order_of_the_api(serve: Serve) -> None:
    body = {"model": "demo", "max_tokens": 9, "messages": HELLO, "tools": TOOLS, "stream": True}
    text = httpx.post(serve(answer).url + "/v1/messages", json=body, timeout=20).text
    kinds = [line[7:] for line in text.split("\n") if line.startswith("event: ")]
    block = ["content_block_start", "content_block_delta"]
    assert [kind for kind in kinds if kind != "ping"] == [
        "message_start",
        *block, "content_block_delta", "content_block_stop",
        *block, "content_block_delta", "content_block_stop",
        *block, "content_block_stop",
        "message_delta", "message_delta", "message_stop",
    ]  # fmt: skip


def test_the_stop_reason_goes_out_before_the_commit(serve: Serve) -> None:
    committed = threading.Event()

    def script(body: Any, model: str) -> Any:
        yield "text", {"text": "yes", "index": 0}
        yield "finish", {"index": 0, "finish_reason": "length"}
        yield committed
        yield done("yes", "length")

    stream = client(serve(script)).messages.create(model="demo", max_tokens=9, messages=HELLO, stream=True)
    usage = []
    for event in stream:
        if event.type == "message_delta":
            assert event.delta.stop_reason == "max_tokens"
            usage.append(event.usage)
            committed.set()
    assert [one.output_tokens for one in usage] == [0, 3]
    assert usage[-1].cache_read_input_tokens == STATS["cached_tokens"]


def test_a_stop_sequence_is_named_streamed_or_not(serve: Serve) -> None:
    def script(body: Any, model: str) -> Any:
        yield "text", {"text": "a", "index": 0}
        yield "finish", {"index": 0, "finish_reason": "stop", "stop_sequence": "END"}
        yield done("a", "stop", stop_sequence="END")

    sdk = client(serve(script))
    whole = sdk.messages.create(model="demo", max_tokens=9, messages=HELLO, stop_sequences=["END"])
    with sdk.messages.stream(model="demo", max_tokens=9, messages=HELLO, stop_sequences=["END"]) as stream:
        final = stream.get_final_message()
    for message in (whole, final):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")


def test_system_blocks_tool_results_and_choices_reach_the_daemon(serve: Serve) -> None:
    served = serve()
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "kvd"},
                {"type": "text", "text": "look"},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Zürich"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "tool_result", "tool_use_id": "c2", "content": "gone", "is_error": True},
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    client(served).messages.create(
        model="demo", max_tokens=9, messages=messages, tools=TOOLS, tool_choice={"type": "any"},
        system=[{"type": "text", "text": "S1", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "S2"}],
        stop_sequences=["END"], thinking={"type": "disabled"}, metadata={"user_id": "u"},
        extra_body={"temperature": 0.3, "top_k": 3, "top_p": 0.5},
    )  # fmt: skip
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
    assert served.daemon.asked[0] == {
        "messages": [
            {"role": "system", "content": "S1\n\nS2"},
            {"role": "user", "content": "a\n\nb"},
            {"role": "assistant", "content": "look", "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            {"role": "tool", "tool_call_id": "c2", "content": "Error: gone"},
            {"role": "user", "content": "and?"},
        ],
        "tools": [
            {"type": "function",
             "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}}},
        ],
        "tool_choice": "required", "template_kwargs": {"enable_thinking": False}, "max_tokens": 9, "stop": ["END"],
        "temperature": 0.3, "top_k": 3, "top_p": 0.5,
    }  # fmt: skip


TOOL_USE = {"type": "tool_use", "id": "c1", "name": "weather", "input": {}}


@pytest.mark.parametrize(
    ("last", "more", "continued"),
    [
        ({"role": "assistant", "content": "{"}, {}, True),
        ({"role": "assistant", "content": [{"type": "text", "text": "{"}]}, {"thinking": {"type": "disabled"}}, True),
        ({"role": "assistant", "content": [{"type": "text", "text": "{"}, TOOL_USE]}, {}, False),
        ({"role": "user", "content": "{"}, {}, False),
    ],
)
def test_an_answer_that_the_client_began_is_continued_not_begun_again(
    serve: Serve, last: Any, more: Any, continued: bool
) -> None:
    served = serve()
    sdk = client(served)
    shared: Any = {"model": "demo", "messages": [*HELLO, last], **more}
    sdk.messages.create(max_tokens=9, **shared)
    sdk.messages.count_tokens(**shared)
    thinking = {"enable_thinking": False} if more else {}
    for asked in served.daemon.asked:
        begun = {"add_generation_prompt": False, "continue_final_message": True} if continued else {}
        assert asked.get("template_kwargs", {}) == {**thinking, **begun}


def test_fields_without_a_meaning_here_are_named_in_the_reply(serve: Serve) -> None:
    reply = client(serve()).messages.create(
        model="demo", max_tokens=9, messages=HELLO, metadata={"user_id": "u"}, service_tier="auto",
        extra_body={"context_management": {"edits": []}},
    ).to_dict()  # fmt: skip
    assert reply["kvd"]["ignored"] == ["context_management", "metadata", "service_tier"]  # type: ignore[index]


def test_structured_output_becomes_a_response_format(serve: Serve) -> None:
    served = serve(lambda body, model: speak('{"x": 3}'))
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    client(served).messages.create(
        model="demo", max_tokens=9, messages=HELLO, output_config={"format": {"type": "json_schema", "schema": schema}}
    )
    assert served.daemon.asked[0]["response_format"] == {
        "type": "json_schema", "json_schema": {"name": "output", "schema": schema}
    }


def test_counting_asks_for_the_same_prompt_as_generating(serve: Serve) -> None:
    served = serve()
    sdk = client(served)
    shared: Any = {"model": "demo", "messages": HELLO, "system": "S", "tools": TOOLS}
    assert sdk.messages.count_tokens(**shared).input_tokens == 17
    sdk.messages.create(max_tokens=9, **shared)
    counted, generated = served.daemon.asked
    assert counted == {key: value for key, value in generated.items() if key != "max_tokens"}


@pytest.mark.parametrize(
    ("problem", "kind", "name"),
    [
        (ContextLengthExceeded("9 of 8", prompt=9, limit=8), anthropic.BadRequestError, "invalid_request_error"),
        (Busy("64 wait", waiting=64, limit=64), anthropic.RateLimitError, "rate_limit_error"),
    ],
)
def test_errors_have_anthropics_shape(
    serve: Serve, problem: Any, kind: type[anthropic.APIStatusError], name: str
) -> None:
    with pytest.raises(kind) as caught:
        client(serve(lambda body, model: [problem])).messages.create(model="demo", max_tokens=9, messages=HELLO)
    body: Any = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == name
    assert body["error"]["details"] == problem.details
    assert body["request_id"] == caught.value.request_id


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"max_tokens": None}, "max_tokens is required"),
        ({"stop_sequences": [str(n) for n in range(17)]}, "stop_sequences must be"),
        ({"stop_sequences": ["x", "y" * 1001]}, "stop_sequences[1] has 1001 characters"),
        ({"output_config": {"format": {"type": "json_schema", "schema": []}}}, "output_config.format.schema"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
         "documents of type 'base64'"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "'other'"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(serve: Serve, change: Any, text: str) -> None:
    body = {"model": "demo", "max_tokens": 9, "messages": HELLO, **change}
    reply = httpx.post(serve().url + "/v1/messages", json=body, timeout=20)
    assert reply.status_code == 400
    assert text in reply.json()["error"]["message"]


def test_models_are_listed_in_the_shape_of_the_api_that_asks(serve: Serve) -> None:
    sdk = client(serve())
    assert [model.id for model in sdk.models.list()] == ["demo", "other"]
    demo = sdk.models.retrieve("demo")
    assert (demo.display_name, demo.max_input_tokens) == ("demo", 8192)
    for path in ("/v1/models/nope", "/v1/files"):
        with pytest.raises(anthropic.NotFoundError) as caught:
            sdk.get(path, cast_to=object)
        assert caught.value.type == "not_found_error" and caught.value.body["type"] == "error"  # type: ignore[index]
