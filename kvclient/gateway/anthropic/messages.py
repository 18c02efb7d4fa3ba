"""`POST /v1/messages` and `/v1/messages/count_tokens`: the request, translated."""

from __future__ import annotations

from typing import Any, Final

from kvclient.errors import BadRequest
from kvclient.gateway.anthropic.blocks import conversation, system_text
from kvclient.gateway.ask import Ask
from kvclient.gateway.fields import Fields
from kvclient.gateway.openai.conversation import named_choice, with_tools
from kvclient.gateway.options import limit, sampling, stops, template_kwargs

CHOICES: Final = {"auto": "auto", "none": "none", "any": "required"}
CONTINUED: Final = {"add_generation_prompt": False, "continue_final_message": True}
"""Template variables for a conversation that ends with the beginning of the answer: it is gone on with."""


def parse(fields: Fields) -> Ask:
    """Raises BadRequest, details.field naming the field."""
    body = prompt_of(fields)
    if (most := limit(fields, "max_tokens")) is None:
        raise BadRequest("max_tokens is required", field="max_tokens")
    body["max_tokens"] = most
    if found := stops(fields, "stop_sequences"):
        body["stop"] = found
    body |= sampling(fields)
    return Ask(fields.text("model"), [body], stream=fields.flag("stream"))


def prompt_of(fields: Fields) -> dict[str, Any]:
    """What decides the prompt's tokens: system, messages, tools, template variables, output format."""
    fields.without("mcp_servers", "the gateway does not call other servers")
    messages = conversation(fields.tables("messages"))
    if not messages:
        raise BadRequest("messages must hold at least one message", field="messages")
    if text := system_text(fields, "system"):
        messages.insert(0, {"role": "system", "content": text})
    body: dict[str, Any] = {"messages": messages}
    tools = [_tool(tool) for tool in fields.tables("tools")]
    with_tools(body, tools, _choice(fields.table("tool_choice"), [tool["function"]["name"] for tool in tools]))
    effort = _output(fields, body)
    kwargs = template_kwargs(fields, effort, _thinking(fields.table("thinking")))
    if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        kwargs |= CONTINUED
    if kwargs:
        body["template_kwargs"] = kwargs
    return body


def _tool(fields: Fields) -> dict[str, Any]:
    if (kind := fields.text("type", "custom")) != "custom":
        raise BadRequest(
            f"{fields.where}: tools of type {kind!r}, which only the API's own models know, are not supported; "
            "give a name and an input_schema",
            field=fields.where,
        )
    function: dict[str, Any] = {"name": fields.needed("name")}
    if description := fields.text("description"):
        function["description"] = description
    schema = fields.table("input_schema")
    if schema is None:
        raise BadRequest(f"{fields.path('input_schema')} is required", field=fields.path("input_schema"))
    function["parameters"] = dict(schema.raw)
    return {"type": "function", "function": function}


def _choice(fields: Fields | None, names: list[str]) -> Any:
    if fields is None:
        return None
    kind = fields.needed("type")
    if kind == "tool":
        return named_choice(fields.needed("name"), names)
    if kind not in CHOICES:
        raise BadRequest(f"tool_choice.type must be auto, any, tool or none, got {kind!r}", field="tool_choice.type")
    return CHOICES[kind]


def _thinking(fields: Fields | None) -> bool | None:
    """None: as the template has it."""
    if fields is None:
        return None
    kind = fields.needed("type")
    return None if kind == "adaptive" else kind != "disabled"


def _output(fields: Fields, body: dict[str, Any]) -> str:
    """Sets `response_format`; returns the effort asked for."""
    config = fields.table("output_config")
    effort = config.text("effort") if config is not None else ""
    shape = config.table("format") if config is not None else None
    shape = shape or fields.table("output_format")
    if shape is None:
        return effort
    schema = shape.table("schema")
    if shape.needed("type") != "json_schema" or schema is None:
        raise BadRequest("the output format must be {type: json_schema, schema}", field=shape.where)
    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": dict(schema.raw)}}
    return effort
