"""How a reply runs: what waits, what is kept alive, what an end in the middle looks like, many at once."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from kvclient.errors import WorkerLost
from kvclient.gateway import reply
from tests.gateway.conftest import Served, serving
from tests.gateway.fake import FakeDaemon, done, speak, words

Serve = Callable[..., Served]
BODY: Any = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
CHAT = "/v1/chat/completions"


def read(served: Served, path: str = CHAT, **more: Any) -> httpx.Response:
    return httpx.post(served.url + path, json={**BODY, **more}, timeout=20)


def test_a_short_wait_sends_nothing_so_that_an_error_keeps_its_status(serve: Serve) -> None:
    served = serve(lambda body, model: [("queued", {"position": 3}), WorkerLost("died", model="demo")])
    assert read(served).status_code == 502


def test_a_long_wait_opens_the_stream_and_an_error_then_comes_inside_it(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply, "HOLD_S", 0.0)
    monkeypatch.setattr(reply, "KEEP_ALIVE_S", 0.0)
    waits = [("queued", {"position": place}) for place in (3, 2, 1)]
    served = serve(lambda body, model: [*waits, WorkerLost("died", model="demo")])
    found = read(served)
    assert found.status_code == 200
    for place in (3, 2, 1):
        assert f": queued {place}\n\n" in found.text
    assert json.loads(found.text.strip().split("\n")[-1].removeprefix("data: "))["error"]["code"] == "worker_lost"
    anthropic = read(served, "/v1/messages", max_tokens=5).text
    assert anthropic.count("event: ping") == 4 and "event: error" in anthropic


def test_keep_alives_are_no_more_than_one_a_second(serve: Serve) -> None:
    chunks = [("progress", {"done": n, "total": 4000, "cached": 0}) for n in range(0, 4000, 10)]
    found = read(serve(lambda body, model: [*chunks, *speak("yes")]))
    assert 1 <= found.text.count(": prefill") <= 10


def test_a_daemon_that_goes_away_ends_the_stream_with_an_error(serve: Serve) -> None:
    gone = threading.Event()

    def script(body: Any, model: str) -> Any:
        yield "text", {"text": "begin", "index": 0}
        yield gone

    served = serve(script)
    sdk = openai.OpenAI(base_url=served.url + "/v1", api_key="x", max_retries=0, timeout=20)
    stream = iter(sdk.chat.completions.create(**BODY))
    assert next(stream).choices[0].delta.role == "assistant"
    served.daemon.stop()
    with pytest.raises(openai.APIError, match="went away|not answered"):
        list(stream)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_a_gateway_that_stops_ends_what_still_runs_with_an_error_and_no_traceback(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    def script(body: Any, model: str) -> Any:
        yield "text", {"text": "begin", "index": 0}
        yield threading.Event()

    with FakeDaemon(script) as daemon, httpx.Client(timeout=20) as http:
        with serving(daemon.socket) as url:
            asked = http.build_request("POST", url + path, json={**BODY, "max_tokens": 9})
            lines = http.send(asked, stream=True).iter_lines()
            assert next(lines)
        assert "the gateway is stopping" in list(lines)[-2]
        assert daemon.cancel_seen.wait(10)
    assert [record for record in caplog.records if record.exc_info] == []


def test_many_streams_at_once_all_get_their_own_words(serve: Serve) -> None:
    def script(body: Any, model: str) -> Any:
        name = body["messages"][0]["content"]
        for word in words(20):
            yield "text", {"text": f"{name}:{word}", "index": 0}
        yield "finish", {"index": 0, "finish_reason": "stop"}
        yield done("")

    url = serve(script).url + CHAT

    async def one(http: httpx.AsyncClient, name: str) -> str:
        found = await http.post(url, json={**BODY, "messages": [{"role": "user", "content": name}]})
        lines = [line[6:] for line in found.text.split("\n") if line.startswith("data: {")]
        return "".join(json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines)

    async def all_of_them() -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=60, limits=limits) as http:
            return await asyncio.gather(*(one(http, f"n{number}") for number in range(64)))

    for number, text in enumerate(asyncio.run(all_of_them())):
        assert text == "".join(f"n{number}:{word}" for word in words(20))


def test_an_unclosed_call_and_odd_text_arrive_as_they_were_written(serve: Serve) -> None:
    parts = ['<tool_call>\n{"name": "f", ', "\u2028\u2029", "👩‍👩‍👧", "\ufffd", "\\", '"\n\ndata: x\n\n', "</think>"]
    served = serve(lambda body, model: speak(*parts))
    for sent in (read(served), read(served, "/v1/completions", prompt="x", messages=None)):
        lines = [json.loads(line[6:]) for line in sent.text.split("\n") if line.startswith("data: {")]
        texts = [c.get("delta", {}).get("content") or c.get("text") or "" for one in lines for c in one["choices"]]
        assert "".join(texts) == "".join(parts)
    text = read(served, "/v1/messages", max_tokens=5).text
    events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
    assert "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta") == "".join(parts)
