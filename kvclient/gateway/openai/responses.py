"""`POST /v1/responses`: the request, translated."""

from __future__ import annotations

from typing import Any, Final

from kvclient.errors import BadRequest
from kvclient.gateway.ask import Ask
from kvclient.gateway.fields import Fields
from kvclient.gateway.openai.conversation import ROLES, choice_of, content_of, tool_call, with_tools
from kvclient.gateway.options import limit, sampling, template_kwargs

REPEATED: Final = (
    "instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "reasoning", "temperature", "text",
    "tool_choice", "tools", "top_p", "truncation", "user",
)
"""Fields of the request that the reply repeats."""
STATELESS: Final = "the gateway keeps no conversations: send all items as input"


def parse(fields: Fields) -> Ask:
    """Raises BadRequest, details.field naming the field."""
    fields.without("previous_response_id", STATELESS)
    fields.without("conversation", STATELESS)
    fields.without("background", "ask with stream or wait for the reply")
    fields.without("prompt", "prompt templates live on the API's own servers")
    fields.without("max_tool_calls", "the daemon has no tools of its own")
    if fields.text("truncation", "disabled") not in ("disabled", "auto"):
        raise BadRequest("truncation must be disabled or auto", field="truncation")
    messages = input_of(fields)
    if instructions := fields.text("instructions"):
        messages.insert(0, {"role": "system", "content": instructions})
    if not messages:
        raise BadRequest("input must not be empty", field="input")
    body: dict[str, Any] = {"messages": messages, **sampling(fields)}
    tools = _tools(fields)
    with_tools(body, tools, choice_of(fields, [tool["function"]["name"] for tool in tools]))
    if (most := limit(fields, "max_output_tokens")) is not None:
        body["max_tokens"] = most
    _text(fields.table("text"), body)
    reasoning = fields.table("reasoning")
    if kwargs := template_kwargs(fields, reasoning.text("effort") if reasoning is not None else ""):
        body["template_kwargs"] = kwargs
    tops = _tops(fields)
    if tops is not None:
        body |= {"logprobs": True, "top_logprobs": tops}
    fields.skip("metadata", "user")
    repeated = {name: fields.raw[name] for name in REPEATED if fields.has(name)}
    return Ask(fields.text("model"), [body], stream=fields.flag("stream"), tops=tops, request=repeated)


def input_of(fields: Fields) -> list[dict[str, Any]]:
    value = fields.any("input")
    if value is None or isinstance(value, str):
        return [{"role": "user", "content": value}] if value else []
    found: list[dict[str, Any]] = []
    for item in fields.tables("input"):
        _add(found, item)
    return found


def _add(found: list[dict[str, Any]], item: Fields) -> None:
    """One input item; calls and reasoning belong to one assistant message, as the model wrote them."""
    kind = item.text("type", "message")
    if kind == "message":
        role = item.needed("role")
        if role not in ROLES:
            raise BadRequest(f"{item.path('role')}: unknown role {role!r}", field=item.path("role"))
        content = content_of(item, "content")
        if role == "assistant" and found and found[-1]["role"] == "assistant" and not found[-1]["content"]:
            found[-1]["content"] = content
        else:
            found.append({"role": "system" if role == "developer" else role, "content": content})
    elif kind == "function_call":
        call = tool_call(item.needed("call_id"), item.needed("name"), item.text("arguments", "{}"))
        _assistant(found).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        found.append({"role": "tool", "tool_call_id": item.needed("call_id"), "content": content_of(item, "output")})
    elif kind == "reasoning":
        thought = "".join(part.text("text") for part in item.tables("content"))
        if thought:
            found.append({"role": "assistant", "content": "", "reasoning_content": thought})
    else:
        raise BadRequest(f"{item.where}: items of type {kind!r} are not supported", field=item.where)


def _assistant(found: list[dict[str, Any]]) -> dict[str, Any]:
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": ""})
    return found[-1]


def _tools(fields: Fields) -> list[dict[str, Any]]:
    """Tools of other types are left out beside functions, and count as ignored: agents offer those of the API's own
    models to every server. Where there are only such, the request is about them. Raises BadRequest then."""
    found = []
    strangers = []
    for tool in fields.tables("tools"):
        if (kind := tool.needed("type")) == "function":
            tool.needed("name")
            found.append({"type": kind, "function": {k: v for k, v in tool.raw.items() if k != "type"}})
        else:
            strangers.append((tool.where, kind))
    if strangers and not found:
        where, kind = strangers[0]
        raise BadRequest(f"{where}: only tools of type 'function' are supported, got {kind!r}", field=where)
    fields.drop(*(f"{where} ({kind})" for where, kind in strangers))
    return found


def _text(fields: Fields | None, body: dict[str, Any]) -> None:
    shape = fields.table("format") if fields is not None else None
    if shape is None or shape.needed("type") == "text":
        return
    kind = shape.needed("type")
    if kind == "json_object":
        body["response_format"] = {"type": "json_object"}
    elif kind == "json_schema" and isinstance(shape.raw.get("schema"), dict):
        spec = {key: value for key, value in shape.raw.items() if key != "type"}
        body["response_format"] = {"type": "json_schema", "json_schema": spec}
    else:
        message = f"text.format must be text, json_object or json_schema with a schema, got {kind!r}"
        raise BadRequest(message, field="text.format")


def _tops(fields: Fields) -> int | None:
    tops = fields.integer("top_logprobs")
    if tops is not None and not 0 <= tops <= 20:
        raise BadRequest(f"top_logprobs must be 0 to 20, got {tops}", field="top_logprobs")
    asked = "message.output_text.logprobs" in fields.items("include")
    return (tops or 0) if asked or tops else None
