"""Keys, origins, limits: what a request meets before any API sees it."""

from __future__ import annotations

import gzip
import re
import threading
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from kvclient.aio import AsyncClient
from kvclient.errors import Busy
from kvclient.gateway.auth import Guard, is_loopback, salt_of
from kvclient.gateway.fields import Fields
from kvclient.gateway.settings import Settings
from kvclient.gateway.volatile import rules_named
from tests.gateway.conftest import Served, serving
from tests.gateway.fake import done

Serve = Callable[..., Served]
BODY: Any = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
CHAT = "/v1/chat/completions"


def keyed(*keys: str) -> Settings:
    return Settings(Guard(keys))


def test_with_keys_nothing_that_holds_data_answers_without_one(serve: Serve) -> None:
    served = serve(settings=keyed("alpha", "beta"))
    for method, path in (
        ("POST", CHAT), ("POST", "/v1/messages"), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/page/data"),
    ):  # fmt: skip
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "alph"}, {"authorization": "alpha"}):
            reply = httpx.request(method, served.url + path, json=BODY if method == "POST" else None, headers=headers)
            assert reply.status_code == 401, (path, headers)
            error = reply.json()["error"]
            assert error["type"] == "authentication_error"
    for path in ("/", "/health", "/healthz", "/page/page.js"):
        assert httpx.get(served.url + path).status_code == 200
    assert served.daemon.asked == []


def test_both_apis_ways_to_send_a_key_are_taken(serve: Serve) -> None:
    served = serve(settings=keyed("alpha", "beta"))
    assert httpx.post(served.url + CHAT, json=BODY, headers={"authorization": "Bearer beta"}).status_code == 200
    assert httpx.post(served.url + CHAT, json=BODY, headers={"x-api-key": "alpha"}).status_code == 200


def test_each_key_has_a_salt_of_its_own_that_does_not_show_it(serve: Serve) -> None:
    served = serve(settings=keyed("alpha", "beta"))
    for key, more in (("alpha", {}), ("beta", {}), ("alpha", {"salt": "x"}), ("alpha", {})):
        httpx.post(served.url + CHAT, json={**BODY, **more}, headers={"x-api-key": key})
    salts = [body["salt"] for body in served.daemon.asked]
    assert salts[0] == salts[3] == salt_of("alpha") and len(set(salts)) == 3
    assert not any("alpha" in salt or "beta" in salt for salt in salts)


def test_without_keys_all_clients_of_the_user_share(serve: Serve) -> None:
    served = serve()
    httpx.post(served.url + CHAT, json=BODY)
    assert "salt" not in served.daemon.asked[0]


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "127.0.0.1.evil.example:80"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
    ],
)
def test_a_web_page_cannot_reach_a_gateway_without_keys(serve: Serve, headers: dict[str, str]) -> None:
    served = serve()
    reply = httpx.post(served.url + CHAT, json=BODY, headers=headers)
    assert reply.status_code == 403
    assert "access-control-allow-origin" not in reply.headers
    assert served.daemon.asked == []


def test_cors_is_for_named_origins_only_and_needs_no_key_for_the_preflight(serve: Serve) -> None:
    served = serve(settings=Settings(Guard(["alpha"], ["https://app.example"])))
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    reply = httpx.options(served.url + CHAT, headers={"origin": "https://app.example", **ask})
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == "https://app.example"
    other = httpx.options(served.url + CHAT, headers={"origin": "https://evil.example", **ask})
    assert "access-control-allow-origin" not in other.headers
    headers = {"origin": "https://app.example", "x-api-key": "alpha"}
    assert httpx.post(served.url + CHAT, json=BODY, headers=headers).status_code == 200


def test_a_body_over_the_limit_is_refused_declared_or_not(serve: Serve) -> None:
    served = serve(settings=Settings(max_body=1000))
    big = {**BODY, "user": "x" * 2000}
    declared = httpx.post(served.url + CHAT, json=big)
    undeclared = httpx.post(served.url + CHAT, content=(b'"', b"x" * 900, b"x" * 900))
    assert [reply.status_code for reply in (declared, undeclared)] == [413, 413]
    assert declared.json()["error"]["code"] == "request_too_large"
    anthropic = httpx.post(served.url + "/v1/messages", json=big).json()
    assert anthropic["error"]["type"] == "request_too_large"
    assert served.daemon.asked == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"messages": [' * 50_000])
def test_a_body_that_is_no_object_is_a_bad_request(serve: Serve, body: bytes) -> None:
    for path in (CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"):
        assert httpx.post(serve().url + path, content=body).status_code == 400


@pytest.mark.parametrize(("part", "field"), [
    (r'"metadata": {"a": ["x", "\ud83d"]}', "metadata.a[1]"), (r'"user": "\uDE00"', "user"),
    (r'"a\ud83d": 1', "the body"),
    (r'"metadata": {"\ud83d": 1}', "metadata"), (r'"tools": [{"x": "\ud83d\u0041"}]', "tools[0].x"),
])  # fmt: skip
def test_half_a_character_anywhere_is_a_bad_request_that_says_where(serve: Serve, part: str, field: str) -> None:
    served = serve()
    for path, stream in (("/v1/responses", "true"), ("/v1/responses", "false"), (CHAT, "false")):
        body = f'{{"model": "demo", "input": "Hi", "messages": [], "stream": {stream}, {part}}}'
        reply = httpx.post(served.url + path, content=body.encode())
        assert reply.status_code == 400 and reply.json()["error"]["message"].startswith(f"{field} holds"), reply.text
    whole = r'{"model": "demo", "input": "Hi", "metadata": {"a": "\ud83d\ude00 \\ud83d"}}'
    reply = httpx.post(served.url + "/v1/responses", content=whole.encode())
    assert reply.json()["metadata"] == {"a": "😀 \\ud83d"}


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_json_does_not_have_are_a_bad_request_and_not_repeated(serve: Serve, number: str) -> None:
    body = f'{{"model": "demo", "input": "Hi", "metadata": {{"a": {number}}}}}'
    reply = httpx.post(serve().url + "/v1/responses", content=body.encode())
    assert reply.status_code == 400 and number in reply.json()["error"]["message"]


def test_more_requests_at_once_than_allowed_are_busy_and_room_comes_back(serve: Serve) -> None:
    go = threading.Event()

    def script(body: Any, model: str) -> Any:
        yield "text", {"text": "a", "index": 0}
        yield go
        yield "finish", {"index": 0, "finish_reason": "stop"}
        yield done("a")

    served = serve(script, Settings(max_requests=1))
    sdk = openai.OpenAI(base_url=served.url + "/v1", api_key="x", max_retries=0)
    stream = sdk.chat.completions.create(**BODY, stream=True)
    next(iter(stream))
    with pytest.raises(openai.RateLimitError) as caught:
        sdk.chat.completions.create(**BODY)
    assert caught.value.response.headers["retry-after"] == "1"
    go.set()
    list(stream)
    assert sdk.with_options(max_retries=5).chat.completions.create(**BODY).choices[0].message.content == "a"


def test_a_body_in_an_encoding_is_refused_as_such(serve: Serve) -> None:
    reply = httpx.post(serve().url + CHAT, content=gzip.compress(b"{}"), headers={"content-encoding": "gzip"})
    assert reply.status_code == 415 and "gzip" in reply.json()["error"]["message"]
    plain = httpx.post(serve().url + CHAT, json=BODY, headers={"content-encoding": "identity"})
    assert plain.status_code == 200


@pytest.mark.parametrize(("path", "meant"), [
    ("/chat/completions", "/v1/chat/completions"), ("/v1/v1/messages", "/v1/messages"), ("/models", "/v1/models"),
    ("/messages/count_tokens", "/v1/messages/count_tokens"),
])  # fmt: skip
def test_a_path_with_one_v1_too_few_or_many_is_told_which_was_meant(serve: Serve, path: str, meant: str) -> None:
    reply = httpx.post(serve().url + path, json=BODY)
    assert reply.status_code == 404 and f"the base URL: {meant} is" in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_a_fault_of_the_gateway_has_the_apis_shape_and_a_request_id(
    monkeypatch: pytest.MonkeyPatch, serve: Serve, path: str
) -> None:
    def broken(*given: object) -> object:
        raise ZeroDivisionError("of this text")

    monkeypatch.setattr(Fields, "flag", broken)
    reply = httpx.post(serve().url + path, json={**BODY, "max_tokens": 1})
    assert reply.status_code == 500 and reply.headers["x-request-id"]
    assert "ZeroDivisionError" in reply.json()["error"]["message"] and "of this text" not in reply.text


def test_unknown_paths_and_methods_have_the_apis_shape(serve: Serve) -> None:
    url = serve().url
    assert httpx.get(url + "/v1/nothing").json()["error"]["code"] == "not_found"
    assert httpx.get(url + CHAT).status_code == 405
    assert httpx.get(url + "/v1/messages/nothing").json()["error"]["type"] == "not_found_error"


def test_every_reply_carries_its_request_id(serve: Serve) -> None:
    url = serve().url
    first, second = (httpx.post(url + CHAT, json=BODY) for _ in range(2))
    assert first.headers["x-request-id"] == first.headers["request-id"] != second.headers["x-request-id"]
    assert first.json()["id"] == "chatcmpl-" + first.headers["x-request-id"]


def test_without_a_daemon_errors_say_so_and_health_is_503(tmp_path: Any) -> None:
    with serving("/tmp/kvd-nobody-here") as url:
        reply = httpx.post(url + CHAT, json=BODY)
        assert reply.status_code == 503 and "start it with" in reply.json()["error"]["message"]
        for path in ("/health", "/healthz"):
            health = httpx.get(url + path)
            assert health.status_code == 503 and "no daemon at /tmp/kvd-nobody-here" in health.json()["message"]
        assert "kvd_up 0.0" in httpx.get(url + "/metrics").text


def test_rules_for_volatile_text_hold_for_the_named_model_and_show_in_the_reply(serve: Serve) -> None:
    served = serve(settings=Settings(volatile={"demo": rules_named(["billing"])}))
    messages = [
        {"role": "system", "content": "x-anthropic-billing-header: v=1; cch=abc;\nBe brief."},
        {"role": "user", "content": "Hi"},
    ]
    reply = httpx.post(served.url + CHAT, json={"model": "demo", "messages": messages}).json()
    assert served.daemon.asked[0]["messages"][0]["content"] == "Be brief."
    assert reply["kvd"]["volatile"] == [{"rule": "billing", "action": "blanked", "lines": 1}]
    served.daemon.default = "other"
    plain = httpx.post(served.url + CHAT, json={"model": "", "messages": messages}).json()
    assert served.daemon.asked[1]["messages"] == messages and "volatile" not in plain["kvd"]


def test_health_is_503_whatever_keeps_the_daemon_from_answering(monkeypatch: pytest.MonkeyPatch, serve: Serve) -> None:
    served = serve()
    assert httpx.get(served.url + "/health").json()["status"] == "ok"

    async def full(client: AsyncClient) -> float:
        raise Busy("its queue was full")

    monkeypatch.setattr(AsyncClient, "ping", full)
    reply = httpx.get(served.url + "/health")
    assert (reply.status_code, reply.json()) == (503, {"status": "unreachable", "message": "its queue was full"})


@pytest.mark.parametrize(("path", "body"), [
    (CHAT, {}), ("/v1/responses", {"input": "Hi"}), ("/v1/completions", {"prompt": "Hi"}),
    ("/v1/completions", {"prompt": ["Hi", "Ho"]}), ("/v1/messages", {"max_tokens": 9}),
])  # fmt: skip
def test_a_request_that_names_no_model_is_answered_with_the_one_that_was_used(
    serve: Serve, path: str, body: Any
) -> None:
    def script(asked: Any, model: str) -> Any:
        yield "queued", {"position": 0, "model": model or "the default"}
        yield "text", {"text": "Hello", "index": 0}
        yield done("Hello")

    served = serve(script)
    messages = {} if "input" in body or "prompt" in body else {"messages": [{"role": "user", "content": "Hi"}]}
    assert httpx.post(served.url + path, json={**messages, **body}).json()["model"] == "the default"
    streamed = httpx.post(served.url + path, json={"stream": True, **messages, **body}).text
    assert set(re.findall(r'"model":\s*"([^"]*)"', streamed)) == {"the default"}
    assert "models" not in served.daemon.verbs


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("127.8.8.8", True), ("0.0.0.0", False), ("::", False),
     ("192.168.1.2", False), ("example.com", False), ("", False)],
)  # fmt: skip
def test_loopback_is_an_address_not_a_name(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
