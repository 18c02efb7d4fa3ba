"""Usage, finish reasons and log probabilities as the OpenAI APIs write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvclient.events import Stats, TokenLogprob, ToolCall

PART: Final = "\ufffd"


def usage(stats: Stats) -> dict[str, Any]:
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.completion_tokens,
        "total_tokens": stats.prompt_tokens + stats.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.cached_tokens},
    }


def response_usage(stats: Stats) -> dict[str, Any]:
    """Usage of the responses API."""
    return {
        "input_tokens": stats.prompt_tokens,
        "input_tokens_details": {"cached_tokens": stats.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": stats.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": stats.prompt_tokens + stats.completion_tokens,
    }


def token(one: TokenLogprob) -> dict[str, Any]:
    """`bytes` is null for a token that is part of a character only: its text does not tell them."""
    whole = None if PART in one.token else list(one.token.encode())
    return {"token": one.token, "logprob": one.logprob, "bytes": whole}


def chat_logprobs(found: Sequence[TokenLogprob], tops: int | None) -> dict[str, Any] | None:
    if tops is None:
        return None
    return {"content": response_logprobs(found, tops), "refusal": None}


def response_logprobs(found: Sequence[TokenLogprob], tops: int) -> list[dict[str, Any]]:
    return [{**token(one), "top_logprobs": [token(top) for top in one.top[:tops]]} for one in found]


def text_logprobs(found: Sequence[TokenLogprob], tops: int | None, offset: int) -> dict[str, Any] | None:
    """Log probabilities of the completions API; `offset` is the length in characters of the text before."""
    if tops is None:
        return None
    offsets = []
    for one in found:
        offsets.append(offset)
        offset += len(one.token)
    return {
        "tokens": [one.token for one in found],
        "token_logprobs": [one.logprob for one in found],
        "top_logprobs": [{top.token: top.logprob for top in one.top[:tops]} for one in found],
        "text_offset": offsets,
    }


def call(found: ToolCall) -> dict[str, Any]:
    return {"id": found.id, "type": "function", "function": {"name": found.name, "arguments": found.arguments}}
