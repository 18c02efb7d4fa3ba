"""Every field of every verb, and what it may hold: checked by clients before sending, by the daemon on arrival.

Pure. `checked` returns a new body with values in their one form on the wire (`stop` a list, `logit_bias` keyed by
decimal strings, fields that are None left out), so that checking twice changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypedDict

from kvclient.errors import BadRequest

Check = Callable[[str, Any], Any]
"""(field name, value) -> value in its form on the wire; raises BadRequest."""

MAX_ID: Final = 2**31 - 1
MAX_CHOICES: Final = 16
MAX_STOPS: Final = 16
MAX_TOP_LOGPROBS: Final = 20
MAX_MODEL: Final = 256
"""characters of a model's name: it travels in the header, which has 4 KiB for everything"""
MAX_DEPTH: Final = 100
"""levels of lists and maps within a field"""
RANDOM: Final = ("seed", "top_p", "top_k", "min_p")
"""Fields of `generate` that say how tokens are drawn: of no effect at temperature 0, where none is."""


class Options(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream` beside model and prompt; None means "not given".

    timeout in seconds, durable_wait_ms in milliseconds, the rest as the field is known elsewhere."""

    tokens: list[int] | None
    messages: list[dict[str, Any]] | None
    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
    template_kwargs: dict[str, Any] | None
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: str | list[str] | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | Mapping[str, float] | None
    logprobs: bool | None
    top_logprobs: int | None
    n: int | None
    response_format: dict[str, Any] | None
    timeout: float | None
    cache: str | None
    salt: str | None
    priority: str | None
    durable_wait_ms: int | None


def refuse(field: str, expected: str, value: Any) -> BadRequest:
    shown = repr(value)[:40] if isinstance(value, bool | int | float | None) else type(value).__name__
    return BadRequest(f"{field} must be {expected}, got {shown}", field=field)


def integer(low: int, high: int) -> Check:
    def check(field: str, value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise refuse(field, f"a whole number from {low} to {high}", value)
        return value
    return check


def number(low: float, high: float = math.inf, *, above: bool = False) -> Check:
    """`above`: `low` itself is not allowed."""
    limit = f"{'>' if above else '>='} {low:g}" + (f" and <= {high:g}" if math.isfinite(high) else "")

    def check(field: str, value: Any) -> float:
        try:
            found = float(value) if type(value) in (int, float) else math.nan
        except OverflowError:
            found = math.inf
        if not math.isfinite(found) or not low <= found <= high or (above and found == low):
            raise refuse(field, f"a number {limit}", value)
        return found
    return check


def string(longest: int | None = None, *, empty: bool = True) -> Check:
    """`longest` in characters."""
    def check(field: str, value: Any) -> str:
        if not isinstance(value, str) or (not empty and not value):
            raise refuse(field, "text" if empty else "text that is not empty", value)
        if longest is not None and len(value) > longest:
            raise BadRequest(f"{field} has {len(value)} characters, at most {longest} are allowed",
                             field=field, size=len(value), limit=longest)
        try:
            value.encode()
        except UnicodeEncodeError as problem:
            raise BadRequest(f"{field} holds a lone surrogate at character {problem.start}: it is no valid text",
                             field=field, position=problem.start) from None
        return value
    return check


def flag(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise refuse(field, "true or false", value)
    return value


def one_of(*allowed: str) -> Check:
    def check(field: str, value: Any) -> str:
        if value not in allowed or not isinstance(value, str):
            got = repr(value)[:40]
            raise BadRequest(f"{field} must be one of {', '.join(allowed)}; got {got}", field=field)
        return value
    return check


def mapping(field: str, value: Any) -> dict[str, Any]:
    """A JSON object: it has to mean the same in a chat template, a grammar or another program."""
    if not isinstance(value, dict):
        raise refuse(field, "a map with text keys", value)
    plain(field, value)
    return value


def plain(field: str, value: Any, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise BadRequest(f"{field} is nested deeper than {MAX_DEPTH} levels", field=field, limit=MAX_DEPTH)
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise refuse(f"{field}: each key", "text", key)
            plain(field, inner, depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            plain(field, inner, depth + 1)
    elif not isinstance(value, str | bool | int | float | None):
        raise refuse(f"{field}: each value", "text, a number, true, false, null, a list or a map", value)


def token_ids(field: str, value: Any) -> list[int]:
    ids = list(value) if isinstance(value, list | tuple) else None
    if not ids:
        raise refuse(field, "a list of token ids that is not empty", value)
    for position, id in enumerate(ids):
        if type(id) is not int or not 0 <= id <= MAX_ID:
            raise BadRequest(f"{field}[{position}] must be a token id from 0 to {MAX_ID}, got {id!r}"[:200],
                             field=field, position=position)
    return ids


def messages(field: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list | tuple) or not value:
        raise refuse(field, "a list of messages that is not empty", value)
    for position, one in enumerate(value):
        name = f"{field}[{position}]"
        mapping(name, one)
        string(64, empty=False)(f"{name}.role", one.get("role"))
        content = one.get("content")
        if isinstance(content, str):
            string()(f"{name}.content", content)
        elif content is not None and not (isinstance(content, list) and all(isinstance(one, dict) for one in content)):
            raise refuse(f"{name}.content", "text, a list of parts or null", content)
    return list(value)


def tools(field: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list | tuple):
        raise refuse(field, "a list of tools", value)
    return [mapping(f"{field}[{position}]", one) for position, one in enumerate(value)]


def tool_choice(field: str, value: Any) -> str | dict[str, Any]:
    if isinstance(value, dict):
        return mapping(field, value)
    checked: str = one_of("auto", "none", "required")(field, value)
    return checked


def stops(field: str, value: Any) -> list[str]:
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list | tuple) or len(given) > MAX_STOPS:
        raise refuse(field, f"text or a list of at most {MAX_STOPS} texts", value)
    return [string(1000, empty=False)(f"{field}[{position}]", one) for position, one in enumerate(given)]


def logit_bias(field: str, value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise refuse(field, "a map from token id to bias", value)
    bias: dict[str, float] = {}
    for key, amount in value.items():
        digits = str(key) if type(key) is int else key
        if not isinstance(digits, str) or not digits.isascii() or not digits.isdigit() or int(digits[:20]) > MAX_ID:
            raise BadRequest(f"{field}: {key!r} is not a token id from 0 to {MAX_ID}"[:200], field=field)
        bias[str(int(digits))] = number(-100, 100)(f"{field}[{digits}]", amount)
    return bias


def response_format(field: str, value: Any) -> dict[str, Any]:
    shape = mapping(field, value)
    kind = one_of("text", "json_object", "json_schema")(f"{field}.type", shape.get("type"))
    if kind == "json_schema":
        nested = mapping(f"{field}.json_schema", shape.get("json_schema"))
        schema = nested.get("schema")
        if not isinstance(schema, bool):
            mapping(f"{field}.json_schema.schema", schema)
    return shape


INPUT: Final[dict[str, Check]] = {"prompt": string(), "tokens": token_ids, "messages": messages}
"""Exactly one of these says what is to be read."""
TEMPLATE: Final[dict[str, Check]] = {"tools": tools, "tool_choice": tool_choice, "template_kwargs": mapping}
"""Only with `messages`."""
SECONDS: Final = number(0, above=True)
CACHE: Final[dict[str, Check]] = {
    "cache": one_of("use", "read", "off"), "salt": string(256), "priority": one_of("interactive", "background"),
    "durable_wait_ms": integer(0, 600_000), "timeout": SECONDS,
}
CACHE_VERBS: Final = ("stats", "ls", "verify", "gc", "clear", "rebuild", "export", "import", "pin", "unpin")

VERBS: Final[dict[str, dict[str, Check]]] = {
    "generate": {
        **INPUT, **TEMPLATE,
        "max_tokens": integer(1, MAX_ID), "n": integer(1, MAX_CHOICES),
        "temperature": number(0, 10), "top_p": number(0, 1), "top_k": integer(-1, MAX_ID),
        "min_p": number(0, 1), "seed": integer(0, 2**64 - 1), "stop": stops,
        "repetition_penalty": number(0.01, 10),
        "presence_penalty": number(-10, 10), "frequency_penalty": number(-10, 10),
        "logit_bias": logit_bias, "logprobs": flag, "top_logprobs": integer(0, MAX_TOP_LOGPROBS),
        "response_format": response_format,
        **CACHE,
    },
    "warm": {**INPUT, **TEMPLATE, **CACHE, "pin": flag, "ttl_s": SECONDS, "open_end": flag},
    "explain": {**INPUT, **TEMPLATE, "salt": string(256), "open_end": flag},
    "count": {**INPUT, **TEMPLATE},
    "models": {"model": string(MAX_MODEL)},
    "load": {"model": string(MAX_MODEL, empty=False), "kv": string(4096), "pin": flag, "ttl_s": SECONDS},
    "unload": {"model": string(MAX_MODEL, empty=False)},
    "status": {},
    "cancel": {"id": string(64, empty=False)},
    "shutdown": {"drain_s": number(0)},
    "ping": {},
    "reload": {},
}
"""`cache` is checked by the store's own verbs: only its `verb` is known here. `open_end`: the text goes on after what
is given (a question follows the document), so only the tokens that stay the same whatever follows are meant."""
REQUIRED: Final = {"load": ("model",), "unload": ("model",), "cancel": ("id",)}


def checked(verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """`body` in its form on the wire. Raises BadRequest (details: field) for a verb or field that does not exist, a
    value out of range, or fields that exclude each other."""
    if verb == "cache":
        one_of(*CACHE_VERBS)("verb", body.get("verb"))
        return {name: value for name, value in body.items() if value is not None}
    table = VERBS.get(verb)
    if table is None:
        raise BadRequest(f"unknown verb {verb[:40]!r}", verb=verb[:40])
    given = {name: value for name, value in body.items() if value is not None}
    if unknown := sorted(str(name) for name in given if name not in table):
        raise BadRequest(f"{verb} has no field {', '.join(unknown)}"[:200], field=unknown[0][:64])
    _require(verb, given, REQUIRED.get(verb, ()))
    result = {name: table[name](name, value) for name, value in given.items()}
    if "prompt" in table:
        _one_input(verb, result)
    if result.get("top_logprobs") and not result.get("logprobs"):
        raise BadRequest("top_logprobs needs logprobs = true", field="top_logprobs")
    return result


def _require(verb: str, given: Mapping[str, Any], names: Iterable[str]) -> None:
    for name in names:
        if name not in given:
            raise BadRequest(f"{verb} needs {name}", field=name)


def _one_input(verb: str, body: Mapping[str, Any]) -> None:
    inputs = [name for name in INPUT if name in body]
    if len(inputs) != 1:
        got = " and ".join(inputs) if inputs else "none"
        raise BadRequest(f"{verb} needs exactly one of prompt, tokens and messages, got {got}", field="prompt")
    for name in TEMPLATE:
        if name in body and "messages" not in body:
            raise BadRequest(f"{name} needs messages: it belongs to the chat template", field=name)
