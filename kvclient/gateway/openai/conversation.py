"""Messages, tools and tool choice of the chat API, checked and brought to what chat templates read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvclient.errors import BadRequest
from kvclient.gateway.fields import Fields, fields_of

ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
TEXT_PARTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def messages_of(fields: Fields) -> list[dict[str, Any]]:
    found = [_message(item) for item in fields.tables("messages")]
    if not found:
        raise BadRequest("messages must hold at least one message", field="messages")
    return found


def _message(fields: Fields) -> dict[str, Any]:
    role = fields.needed("role")
    if role not in ROLES:
        raise BadRequest(f"{fields.path('role')}: unknown role {role!r}", field=fields.path("role"))
    if role == "developer":
        role = "system"
    message: dict[str, Any] = {"role": "tool" if role == "function" else role, "content": content_of(fields, "content")}
    if name := fields.text("name"):
        message["name"] = name
    if role == "tool":
        message["tool_call_id"] = fields.text("tool_call_id")
    if role == "assistant":
        fields.without("function_call", "use tool_calls")
        if thought := fields.text("reasoning_content") or fields.text("reasoning"):
            message["reasoning_content"] = thought
        if calls := [_call(item) for item in fields.tables("tool_calls")]:
            message["tool_calls"] = calls
    return message


def _call(fields: Fields) -> dict[str, Any]:
    function = fields.table("function")
    if function is None:
        raise BadRequest(f"{fields.path('function')} is required", field=fields.path("function"))
    return tool_call(fields.text("id"), function.needed("name"), function.text("arguments", "{}"))


def tool_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call as the daemon takes it: `arguments` is JSON text."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def content_of(fields: Fields, name: str) -> str:
    """Text of a message: a string, or a list of text parts that are joined. Anything but text is refused by name."""
    value = fields.any(name)
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        fields.refuse(name, "a string or a list of parts")
    return "".join(_part(fields_of(item, f"{fields.path(name)}[{index}]")) for index, item in enumerate(value))


def _part(fields: Fields) -> str:
    kind = fields.needed("type")
    if kind not in TEXT_PARTS:
        raise BadRequest(
            f"{fields.where}: parts of type {kind!r} are not supported, models here read text", field=fields.where
        )
    return fields.text(TEXT_PARTS[kind])


def tools_of(fields: Fields) -> list[dict[str, Any]]:
    """`tools` as given, each checked to be a function with a name."""
    found = []
    for tool in fields.tables("tools"):
        kind, function = tool.text("type", "function"), tool.table("function")
        if kind != "function" or function is None:
            raise BadRequest(
                f"{tool.where}: only tools of type 'function' are supported, got {kind!r}", field=tool.where
            )
        function.needed("name")
        found.append({"type": "function", "function": dict(function.raw)})
    return found


def choice_of(fields: Fields, names: Sequence[str]) -> Any:
    """`tool_choice`: "none" | "auto" | "required" | {"type": "function", "function": {"name"}}. None if not given."""
    value = fields.any("tool_choice")
    if value is None:
        return None
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            message = f"tool_choice must be none, auto, required or a function, got {value!r}"
            raise BadRequest(message, field="tool_choice")
        if value == "required" and not names:
            raise BadRequest("tool_choice is 'required' but there are no tools", field="tool_choice")
        return value
    choice = fields_of(value, "tool_choice")
    if (kind := choice.text("type", "function")) != "function":
        raise BadRequest(f"tool_choice.type must be function, got {kind!r}", field="tool_choice.type")
    function = choice.table("function") or choice
    return named_choice(function.needed("name"), names)


def named_choice(name: str, names: Sequence[str]) -> dict[str, Any]:
    if name not in names:
        message = f"tool_choice names {name!r}, which is not among the tools"
        raise BadRequest(message, field="tool_choice", tools=list(names))
    return {"type": "function", "function": {"name": name}}


def with_tools(body: dict[str, Any], tools: list[dict[str, Any]], choice: Any) -> None:
    """Put tools and choice into a `generate` body."""
    if tools:
        body["tools"] = tools
    if choice is not None and tools:
        body["tool_choice"] = choice
