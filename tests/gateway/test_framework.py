"""An agent framework's own client (pydantic-ai) against the gateway: a run with a tool, streamed text, typed output."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed: no framework's client is tried")

from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.gateway.conftest import Served
from tests.gateway.fake import done, speak

Serve = Callable[..., Served]


def provider(url: str) -> OpenAIProvider:
    return OpenAIProvider(base_url=url + "/v1", api_key="none")


def calls_then_answers(body: dict[str, Any], model: str) -> Any:
    """Calls the tool once; with its result, says it."""
    results = [message["content"] for message in body["messages"] if message["role"] == "tool"]
    if results:
        return speak("It is ", results[-1], ".")
    name = body["tools"][0]["function"]["name"]
    call = {"id": "call_1", "name": name, "arguments": '{"city": "Seoul"}'}
    return [
        ("tool_call", {"index": 0, "call": call}),
        ("finish", {"index": 0, "finish_reason": "tool_calls"}),
        done("", "tool_calls", tool_calls=[call]),
    ]


@pytest.mark.parametrize("kind", [OpenAIChatModel, OpenAIResponsesModel])
def test_an_agent_runs_its_tool_and_gets_the_answer(serve: Serve, kind: Any) -> None:
    served = serve(calls_then_answers)
    agent = Agent(kind("demo", provider=provider(served.url)), system_prompt="Be brief.")
    seen = []

    @agent.tool_plain
    def weather(city: str) -> str:
        """Weather of a city."""
        seen.append(city)
        return "rain"

    assert agent.run_sync("Weather?").output == "It is rain."
    assert seen == ["Seoul"]
    roles = [message["role"] for message in served.daemon.asked[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "tool"]


@pytest.mark.parametrize("kind", [OpenAIChatModel, OpenAIResponsesModel])
def test_text_streams(serve: Serve, kind: Any) -> None:
    agent = Agent(kind("demo", provider=provider(serve().url)))

    async def gather() -> list[str]:
        async with agent.run_stream("Hi") as run:
            return [text async for text in run.stream_text(delta=True, debounce_by=None)]

    assert "".join(asyncio.run(gather())) == "Hello there"


def test_on_the_demo_model_an_agent_gets_typed_output(real_url: str) -> None:
    class Answer(BaseModel):
        yes: bool

    settings: Any = {"temperature": 0, "max_tokens": 30}
    agent = Agent(
        OpenAIChatModel("demo", provider=provider(real_url)), output_type=NativeOutput(Answer), model_settings=settings
    )
    assert isinstance(agent.run_sync("Is water wet?").output, Answer)
