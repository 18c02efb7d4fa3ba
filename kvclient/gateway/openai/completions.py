"""`POST /v1/completions`: the request, translated."""

from __future__ import annotations

from typing import Any, Final

from kvclient.errors import BadRequest
from kvclient.gateway.ask import Ask
from kvclient.gateway.fields import Fields
from kvclient.gateway.openai.chat import stream_of
from kvclient.gateway.options import choices, limit, response_format, sampling, stops

DEFAULT_MAX_TOKENS: Final = 16
"""the API's own"""
MAX_PROMPTS: Final = 64


def parse(fields: Fields) -> Ask:
    """Raises BadRequest, details.field naming the field."""
    fields.without("suffix", "text is only added at the end")
    prompts = _prompts(fields)
    shared = sampling(fields)
    n = choices(fields, shared)
    best = fields.integer("best_of")
    if best is not None and best != n:
        raise BadRequest(f"best_of is only supported where it equals n ({n}), got {best}", field="best_of")
    most = limit(fields, "max_tokens")
    shared["max_tokens"] = DEFAULT_MAX_TOKENS if most is None else most
    if found := stops(fields, "stop"):
        shared["stop"] = found
    if (shape := response_format(fields)) is not None:
        shared["response_format"] = shape
    tops = fields.integer("logprobs")
    if tops is not None:
        if not 0 <= tops <= 20:
            raise BadRequest(f"logprobs must be 0 to 20, got {tops}", field="logprobs")
        shared |= {"logprobs": True, "top_logprobs": tops}
    echo: list[str] = []
    if fields.flag("echo"):
        if tops is not None:
            raise BadRequest("echo with logprobs is not supported: prompts are not scored", field="echo")
        if any("tokens" in prompt for prompt in prompts):
            raise BadRequest("echo needs the prompt as text", field="echo")
        echo = [prompt["prompt"] for prompt in prompts]
    stream, usage = stream_of(fields)
    bodies = [{**prompt, **shared} for prompt in prompts]
    return Ask(fields.text("model"), bodies, n, stream, usage, echo=echo, tops=tops)


def _prompts(fields: Fields) -> list[dict[str, Any]]:
    """A string, token ids, or a list of either."""
    value = fields.any("prompt")
    if isinstance(value, str):
        return [{"prompt": value}]
    if not isinstance(value, list) or not value:
        fields.refuse("prompt", "a string, token ids, or a list of either that is not empty")
    if all(_is_id(item) for item in value):
        return [{"tokens": value}]
    if len(value) > MAX_PROMPTS:
        raise BadRequest(f"at most {MAX_PROMPTS} prompts in one request, got {len(value)}", field="prompt")
    found: list[dict[str, Any]] = []
    for item in value:
        if isinstance(item, str):
            found.append({"prompt": item})
        elif isinstance(item, list) and item and all(_is_id(id) for id in item):
            found.append({"tokens": item})
        else:
            fields.refuse("prompt", "a string, token ids, or a list of either")
    return found


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
