"""`/v1/completions`, `/v1/models` and `/v1/embeddings` through the official SDK."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from kvclient.errors import Internal
from tests.gateway.conftest import Served
from tests.gateway.fake import done, speak

Serve = Callable[..., Served]


def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=20)


def echo(body: Any, model: str) -> Any:
    """Answers with the prompt in capitals."""
    return speak(body["prompt"].upper() if "prompt" in body else str(len(body["tokens"])))


def test_a_prompt_is_continued_for_sixteen_tokens_by_default(serve: Serve) -> None:
    served = serve()
    reply = client(served).completions.create(model="demo", prompt="Once", stop=["\n"])
    assert reply.choices[0].text == "Hello there"
    assert reply.usage is not None and reply.usage.prompt_tokens == 40
    assert served.daemon.asked[0] == {"prompt": "Once", "max_tokens": 16, "stop": ["\n"]}


def test_token_ids_and_several_prompts_are_taken_and_usage_is_their_sum(serve: Serve) -> None:
    served = serve(echo)
    sdk = client(served)
    assert sdk.completions.create(model="demo", prompt=[5, 6, 7]).choices[0].text == "3"
    reply = sdk.completions.create(model="demo", prompt=["a", "b", "c"], echo=True)
    assert [(c.index, c.text) for c in reply.choices] == [(0, "aA"), (1, "bB"), (2, "cC")]
    assert reply.usage is not None and reply.usage.prompt_tokens == 120


def test_several_prompts_stream_with_their_own_index(serve: Serve) -> None:
    texts = {0: "", 1: ""}
    chunks = list(client(serve(echo)).completions.create(model="demo", prompt=["a", "b"], stream=True))
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "A", 1: "B"}
    assert sum(chunk.choices[0].finish_reason == "stop" for chunk in chunks) == 2


def test_one_failing_prompt_ends_all_and_cancels_the_others(serve: Serve) -> None:
    never = threading.Event()

    def script(body: Any, model: str) -> Any:
        if body["prompt"] == "bad":
            return [Internal("broken")]
        return iter([("text", {"text": "x", "index": 0}), never])

    served = serve(script)
    with pytest.raises(openai.InternalServerError):
        client(served).completions.create(model="demo", prompt=["good", "bad"])
    assert served.daemon.cancel_seen.wait(10)


def test_logprobs_have_the_older_shape(serve: Serve) -> None:
    top = [{"id": 1, "token": "a", "logprob": -0.1}, {"id": 2, "token": "b", "logprob": -3.0}]

    def script(body: Any, model: str) -> Any:
        assert body["top_logprobs"] == 2
        for _ in range(2):
            yield "text", {"text": "a", "index": 0, "logprobs": [{"id": 1, "token": "a", "logprob": -0.1, "top": top}]}
        yield "finish", {"index": 0, "finish_reason": "length"}
        yield done("aa", "length")

    sdk = client(serve(script))
    whole = sdk.completions.create(model="demo", prompt="x", logprobs=2).choices[0].logprobs
    assert whole is not None
    assert (whole.tokens, whole.token_logprobs, whole.text_offset) == (["a", "a"], [-0.1, -0.1], [0, 1])
    assert whole.top_logprobs == [{"a": -0.1, "b": -3.0}] * 2
    streamed = list(sdk.completions.create(model="demo", prompt="x", logprobs=2, stream=True))
    assert [c.choices[0].logprobs.text_offset for c in streamed if c.choices[0].logprobs] == [[0], [1]]


@pytest.mark.parametrize(
    "change", [{"suffix": "x"}, {"best_of": 3}, {"prompt": []}, {"prompt": [True]}, {"logprobs": 99}]
)
def test_what_cannot_be_served_is_refused(serve: Serve, change: Any) -> None:
    served = serve()
    with pytest.raises(openai.BadRequestError):
        client(served).completions.create(**{"model": "demo", "prompt": "x", **change})
    assert served.daemon.asked == []


def test_models_are_listed_and_found_by_name(serve: Serve) -> None:
    sdk = client(serve())
    assert [(model.id, model.created) for model in sdk.models.list()] == [("demo", 1_700_000_000), ("other", 0)]
    assert sdk.models.retrieve("other").owned_by == "kvd"
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("nope")


def test_a_listed_model_has_the_fields_of_the_api_and_its_context_length_and_nothing_of_the_inside(
    serve: Serve,
) -> None:
    served = serve()
    demo, other = httpx.get(served.url + "/v1/models").json()["data"]
    common = {"object": "model", "owned_by": "kvd"}
    length = {"max_model_len": 8192, "context_length": 8192}
    assert demo == {"id": "demo", "created": 1_700_000_000, **common, **length}
    assert other == {"id": "other", "created": 0, **common}
    assert httpx.get(served.url + "/v1/models/demo").json() == demo
    assert httpx.get(served.url + "/v1/models/").json() == demo, "the default one"


def test_embeddings_are_a_clear_not_found(serve: Serve) -> None:
    with pytest.raises(openai.NotFoundError, match="computes no embeddings"):
        client(serve()).embeddings.create(model="demo", input="x")
