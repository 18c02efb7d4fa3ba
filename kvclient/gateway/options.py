"""Sampling and cache options: parsed once for chat, completions, responses and messages."""

from __future__ import annotations

from typing import Any, Final

from kvclient.errors import BadRequest
from kvclient.fields import MAX_CHOICES, RANDOM, VERBS
from kvclient.gateway.fields import Fields

NUMBERS: Final = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "timeout",
)
INTEGERS: Final = ("top_k", "seed", "durable_wait_ms")
TEXTS: Final = ("cache", "priority")
GENERATE: Final = VERBS["generate"]
"""The daemon's own checks: for fields that have another name here, so that an error has it."""


def sampling(fields: Fields) -> dict[str, Any]:
    """Fields of the daemon's `generate` for how to draw tokens and how to use the cache. Types are checked here, ranges
    by the daemon. Besides the official ones, the daemon's own names are taken (`top_k`, `min_p`, `cache`, …)."""
    found: dict[str, Any] = {}
    for name in NUMBERS:
        if (number := fields.number(name)) is not None:
            found[name] = number
    for name in INTEGERS:
        if (integer := fields.integer(name)) is not None:
            found[name] = integer
    if -(2**63) <= found.get("seed", 0) < 0:  # OpenAI's is a signed number of 64 bits
        found["seed"] += 2**64
    for name in TEXTS:
        if text := fields.text(name):
            found[name] = text
    if salt := fields.text("salt"):
        found["salt"] = salt
    if bias := logit_bias(fields):
        found["logit_bias"] = bias
    if not found.get("temperature"):
        fields.leave(*RANDOM)
    return found


def logit_bias(fields: Fields) -> dict[str, float]:
    """Token id (as text, JSON has no other keys) -> bias."""
    table = fields.table("logit_bias")
    if table is None:
        return {}
    found = {}
    for key in table.raw:
        if not key.isascii() or not key.isdigit():
            raise BadRequest(f"logit_bias: {key!r} is not a token id", field="logit_bias")
        if (bias := table.number(key)) is None:
            raise BadRequest(f"logit_bias: token {key} has no number", field="logit_bias")
        found[key] = bias
    return found


def stops(fields: Fields, name: str) -> list[str]:
    value = fields.any(name)
    return [] if value is None else list(GENERATE["stop"](name, value))


def limit(fields: Fields, name: str) -> int | None:
    """Of the answer, in tokens; None: not given."""
    value = fields.any(name)
    return None if value is None else int(GENERATE["max_tokens"](name, value))


def choices(fields: Fields, body: dict[str, Any]) -> int:
    """How many the reply has; `body` gets its `n`. At temperature 0 all would be equal: one is asked for, the reply
    repeats it, and `n` counts as ignored."""
    n = fields.integer("n")
    if n is None:
        return 1
    if not 1 <= n <= MAX_CHOICES:
        raise BadRequest(f"n must be 1 to {MAX_CHOICES}, got {n}", field="n", limit=MAX_CHOICES)
    if n > 1 and body.get("temperature"):
        body["n"] = n
    elif n > 1:
        fields.leave("n")
    return n


def template_kwargs(fields: Fields, effort: str = "", thinking: bool | None = None) -> dict[str, Any]:
    """Variables for the chat template: the client's own (`chat_template_kwargs`), and the reasoning switches that
    templates know. A template that has no use for one ignores it."""
    found: dict[str, Any] = {}
    if effort:
        found["reasoning_effort"] = effort
        if effort == "none":
            thinking = False
    if thinking is not None:
        found["enable_thinking"] = thinking
    if (own := fields.table("chat_template_kwargs")) is not None:
        found.update(own.raw)
    return found


def response_format(fields: Fields) -> dict[str, Any] | None:
    """`response_format` of chat and completions. Raises BadRequest for kinds that do not exist."""
    table = fields.table("response_format")
    if table is None:
        return None
    kind = table.needed("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind == "json_schema":
        spec = table.table("json_schema")
        if spec is None or not isinstance(spec.raw.get("schema"), dict):
            raise BadRequest("response_format.json_schema.schema is required", field="response_format.json_schema")
        return {"type": "json_schema", "json_schema": dict(spec.raw)}
    raise BadRequest(
        f"response_format.type must be text, json_object or json_schema, got {kind!r}", field="response_format.type"
    )
