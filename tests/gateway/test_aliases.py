"""Aliases as agents meet them: listed, answered under the name that was asked for, one model and one cache behind."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import openai
import pytest

from kvclient.gateway.settings import Settings
from kvclient.gateway.volatile import rules_named
from rig.daemon import Daemon
from tests.gateway.conftest import Served
from tests.gateway.fake import MODELS, done, speak

Serve = Callable[..., Served]
CHAT = "/v1/chat/completions"


def test_aliases_that_are_names_are_listed_and_found_as_models_and_patterns_are_not(serve: Serve) -> None:
    served = serve()
    demo, other = served.daemon.models
    served.daemon.models = [{**demo, "aliases": ["claude-*", "gpt-4o"]}, {**other, "aliases": ["o3"]}]
    sdk = openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=20)
    assert [model.id for model in sdk.models.list()] == ["demo", "gpt-4o", "other", "o3"]
    assert sdk.models.retrieve("gpt-4o").model_dump() == {**sdk.models.retrieve("demo").model_dump(), "id": "gpt-4o"}
    anthropics = {"anthropic-version": "2023-06-01"}
    listed = httpx.get(served.url + "/v1/models", headers=anthropics).json()
    assert [model["id"] for model in listed["data"]] == ["demo", "gpt-4o", "other", "o3"]
    found = httpx.get(served.url + "/v1/models/o3", headers=anthropics).json()
    assert (found["id"], found["display_name"]) == ("o3", "o3")


def test_a_models_rules_hold_under_its_aliases_and_an_aliases_own_come_first(serve: Serve) -> None:
    rules = {"demo": rules_named(["billing"]), "gpt-4o": [], "*": rules_named(["date"])}
    served = serve(lambda body, model: speak("Hello"), settings=Settings(volatile=rules))
    served.daemon.models = [{**MODELS[0], "aliases": ["claude-x", "gpt-4o"]}, MODELS[1]]
    messages = [
        {"role": "system", "content": "x-anthropic-billing-header: v=1; cch=abc;\nToday is 2026-02-03.\nBe brief."},
        {"role": "user", "content": "Hi"},
    ]

    def applied(model: str) -> list[str]:
        reply = httpx.post(served.url + CHAT, json={"model": model, "messages": messages}).json()
        return [one["rule"] for one in reply["kvd"].get("volatile", [])]

    assert (applied("demo"), applied("gpt-4o")) == (["billing"], [])
    assert "models" not in served.daemon.verbs
    assert (applied("claude-x"), applied("other"), applied("")) == (["billing"], ["date"], ["billing"])
    assert httpx.post(served.url + CHAT, json={"model": "nope", "messages": messages}).status_code == 404


@pytest.mark.parametrize(("path", "body"), [
    (CHAT, {}), ("/v1/responses", {"input": "Hi"}), ("/v1/completions", {"prompt": "Hi"}),
    ("/v1/messages", {"max_tokens": 9}),
])  # fmt: skip
def test_a_reply_carries_the_name_that_was_asked_for_not_the_model_that_it_led_to(
    serve: Serve, path: str, body: Any
) -> None:
    def script(asked: Any, model: str) -> Any:
        assert model == "claude-x"
        yield "queued", {"position": 0, "model": "demo"}
        yield "text", {"text": "Hello", "index": 0}
        kind, last = done("Hello")
        yield kind, {**last, "model": "demo"}

    served = serve(script)
    messages = {} if "input" in body or "prompt" in body else {"messages": [{"role": "user", "content": "Hi"}]}
    asked = {"model": "claude-x", **messages, **body}
    assert httpx.post(served.url + path, json=asked).json()["model"] == "claude-x"
    streamed = httpx.post(served.url + path, json={**asked, "stream": True}).text
    assert set(re.findall(r'"model":\s*"([^"]*)"', streamed)) == {"claude-x"}


def test_the_time_a_model_took_to_read_under_one_name_is_what_another_name_saves(serve: Serve) -> None:
    def script(body: Any, model: str) -> Any:
        stats = {"computed_tokens": 100, "cached_tokens": 0, "prefill_s": 2.0} if model == "claude-a" else {}
        kind, last = done("x", stats=stats)
        yield kind, {**last, "model": "demo"}

    served = serve(script)
    for model in ("claude-a", "claude-b"):
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}]}
        httpx.post(served.url + "/v1/chat/completions", json=body)
    recent = httpx.get(served.url + "/page/data").json()["recent"]
    assert [(one["model"], one["saved_s"]) for one in recent] == [("demo", 0.0), ("demo", 30 * 2.0 / 100)]


def test_agents_with_fixed_names_share_one_model_and_its_cache(real_url: str, real_daemon: Daemon) -> None:
    sdk = openai.OpenAI(base_url=real_url + "/v1", api_key="none", max_retries=0, timeout=120)
    claude = anthropic.Anthropic(base_url=real_url, api_key="none", max_retries=0, timeout=120)
    messages: Any = [{"role": "user", "content": "Name a fruit. " + "It grows on a tree. " * 20}]
    asked: Any = {"max_tokens": 6, "messages": messages}
    first = claude.messages.create(model="claude-sonnet-4-5-20250929", **asked)
    second = claude.messages.create(model="claude-haiku-4-5", **asked)
    counted = claude.messages.count_tokens(model="claude-opus-4-1", messages=messages).input_tokens
    assert (first.model, second.model) == ("claude-sonnet-4-5-20250929", "claude-haiku-4-5")
    assert first.usage.cache_read_input_tokens != second.usage.cache_read_input_tokens == counted - 1
    usage: Any = {"include_usage": True}
    chunks: Any = list(sdk.chat.completions.create(model="gpt-4o", **asked, stream=True, stream_options=usage))
    assert {chunk.model for chunk in chunks} == {"gpt-4o"}
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == counted - 1
    assert len(real_daemon.worker_pids()) == 1
    assert [model.id for model in sdk.models.list()] == ["demo", "gpt-4o"]
    assert sdk.models.retrieve("claude-haiku-4-5").id == "claude-haiku-4-5"
    with pytest.raises(openai.NotFoundError, match="'o3'"):
        sdk.chat.completions.create(model="o3", **asked)
