"""Refusals and errors of `/v1/chat/completions`, as the official SDK meets them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import openai
import pytest

from kvclient.errors import Busy, ContextLengthExceeded, Internal, OutOfMemory, WorkerLost
from tests.gateway.conftest import Served
from tests.gateway.test_chat import HELLO, client

Serve = Callable[..., Served]


@pytest.mark.parametrize(
    ("problem", "kind", "status"),
    [
        (ContextLengthExceeded("too long: 9 of 8", prompt=9, limit=8, reusable_prefix=0), openai.BadRequestError, 400),
        (Busy("64 wait", waiting=64, limit=64), openai.RateLimitError, 429),
        (Internal("oh"), openai.InternalServerError, 500),
    ],
)
def test_errors_of_the_daemon_have_their_status_also_when_streaming(
    serve: Serve, problem: Any, kind: type[openai.APIStatusError], status: int
) -> None:
    sdk = client(serve(lambda body, model: [("queued", {"position": 0}), problem]))
    for stream in (False, True):
        with pytest.raises(kind) as caught:
            sdk.chat.completions.create(model="demo", messages=HELLO, stream=stream)
        assert caught.value.status_code == status
        assert caught.value.body["message"] == problem.message  # type: ignore[index]
        assert caught.value.body.get("details", {}) == problem.details  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("problem", "status", "times"),
    [
        (Busy("64 wait", waiting=64, limit=64), 429, 3),
        (OutOfMemory("3 of 4 are free", needed=4, available=3, budget=9), 507, 3),
        (OutOfMemory("more than 9", needed=10, available=3, budget=9), 400, 1),
        (WorkerLost("died", model="demo", reason="signal"), 502, 3),
        (WorkerLost("stays down", model="demo", reason="crash_loop"), 502, 1),
    ],
)
def test_the_sdks_ask_again_what_may_come_right_and_not_what_never_fits(
    serve: Serve, problem: Any, status: int, times: int
) -> None:
    served = serve(lambda body, model: [problem])
    reply = httpx.post(served.url + "/v1/chat/completions", json={"model": "demo", "messages": HELLO}, timeout=20)
    assert (reply.status_code, "retry-after" in reply.headers) == (status, status in (429, 507))
    assert reply.json()["error"]["code"] == problem.code
    asks: list[Callable[[], object]] = [
        lambda: client(served).with_options(max_retries=2).chat.completions.create(model="demo", messages=HELLO),
        lambda: anthropic.Anthropic(base_url=served.url, api_key="x", timeout=20).messages.create(
            model="demo", messages=HELLO, max_tokens=1
        ),
    ]
    for ask in asks:
        served.daemon.asked.clear()
        with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)):
            ask()
        assert len(served.daemon.asked) == times


def test_an_error_after_the_first_token_ends_the_stream_with_it(serve: Serve) -> None:
    sdk = client(serve(lambda body, model: [("text", {"text": "a", "index": 0}), Internal("the worker died")]))
    with pytest.raises(openai.APIError, match="the worker died"):
        list(sdk.chat.completions.create(model="demo", messages=HELLO, stream=True))


def test_an_unknown_model_is_not_found(serve: Serve) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client(serve()).chat.completions.create(model="nope", messages=HELLO)
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 99.0}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"timeout": 10**400}, "timeout"),
        ({"logit_bias": {"5": 10**400}}, "logit_bias"),
        ({"temperature": 1, "seed": -(2**63) - 1}, "seed"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0].function_call"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0]"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.type"),
        ({"n": 0}, "n"),
        ({"n": 100000000}, "n"),
        ({"stop": [""]}, "stop"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"stream_options": 3}, "stream_options"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"stop": ["x"] * 17}, "stop"),
    ],
)
def test_a_bad_field_is_refused_by_name_before_anything_is_asked(serve: Serve, change: Any, field: str) -> None:
    served = serve()
    body = {"model": "demo", "messages": HELLO, **change}
    reply = httpx.post(served.url + "/v1/chat/completions", json=body, timeout=20)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert str(error["param"]).startswith(field), error
    assert served.daemon.asked == []


def test_fields_without_a_meaning_here_are_named_in_the_reply(serve: Serve) -> None:
    idle = {
        "frobnicate": 1, "metadata": {}, "parallel_tool_calls": True, "prompt_cache_key": "k", "service_tier": "auto",
        "store": False, "user": "me", "verbosity": "low",
    }  # fmt: skip
    body = {"model": "demo", "messages": HELLO, "reasoning_effort": "low", "safety_identifier": None, **idle}
    reply = httpx.post(serve().url + "/v1/chat/completions", json=body, timeout=20).json()
    assert reply["kvd"]["ignored"] == sorted(idle)


@pytest.mark.parametrize(("temperature", "ignored"), [
    ({}, ["min_p", "seed", "top_k", "top_p"]), ({"temperature": 0}, ["min_p", "seed", "top_k", "top_p"]),
    ({"temperature": 0.5}, None),
])  # fmt: skip
def test_how_to_draw_is_named_in_the_reply_where_nothing_is_drawn(
    serve: Serve, temperature: Any, ignored: list[str] | None
) -> None:
    body = {"model": "demo", "messages": HELLO, "seed": 1, "top_p": 0.5, "top_k": 3, "min_p": 0.1, **temperature}
    reply = httpx.post(serve().url + "/v1/chat/completions", json=body, timeout=20).json()
    assert reply["kvd"].get("ignored") == ignored
