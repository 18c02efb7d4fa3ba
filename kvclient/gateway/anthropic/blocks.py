"""Content blocks of the messages API, brought to the daemon's messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from kvclient.errors import BadRequest
from kvclient.gateway.fields import Fields
from kvclient.gateway.openai.conversation import tool_call

ROLES: Final = frozenset({"user", "assistant", "system"})


def system_text(fields: Fields, name: str) -> str:
    """A string, or text blocks that become paragraphs."""
    if isinstance(fields.raw.get(name), str) or not fields.has(name):
        return fields.text(name)
    return "\n\n".join(_text(block) for block in fields.tables(name))


def conversation(messages: Sequence[Fields]) -> list[dict[str, Any]]:
    """A user message with tool results becomes `tool` messages and, for its text, a `user` message, in their order."""
    found: list[dict[str, Any]] = []
    for fields in messages:
        role = fields.needed("role")
        if role not in ROLES:
            where = fields.path("role")
            raise BadRequest(f"{where} must be user or assistant, got {role!r}", field=where)
        if isinstance(fields.raw.get("content"), str):
            found.append({"role": role, "content": fields.text("content")})
        elif role == "assistant":
            found.append(_assistant(fields.tables("content")))
        else:
            found.extend(_user(role, fields.tables("content")))
    return found


def _assistant(blocks: Sequence[Fields]) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.needed("type")
        if kind == "thinking":
            thoughts.append(block.text("thinking"))
        elif kind == "tool_use":
            given = block.table("input")
            # As a model writes it: what comes back from a client must render to the tokens that were generated.
            arguments = json.dumps(given.raw if given else {}, ensure_ascii=False)
            calls.append(tool_call(block.text("id"), block.needed("name"), arguments))
        elif kind != "redacted_thinking":
            texts.append(_text(block))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(role: str, blocks: Sequence[Fields]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            found.append({"role": role, "content": "\n\n".join(texts)})
            texts.clear()

    for block in blocks:
        if block.needed("type") == "tool_result":
            flush()
            found.append({"role": "tool", "tool_call_id": block.text("tool_use_id"), "content": _result(block)})
        else:
            texts.append(_text(block))
    flush()
    return found or [{"role": role, "content": ""}]


def _result(block: Fields) -> str:
    """A tool's result as text; a failed one says so, since templates have no place for the flag."""
    if block.has("content") and not isinstance(block.raw["content"], str):
        text = "\n\n".join(_text(item) for item in block.tables("content"))
    else:
        text = block.text("content")
    return f"Error: {text}" if block.flag("is_error") else text


def _text(block: Fields) -> str:
    kind = block.needed("type")
    if kind == "text":
        return block.text("text")
    if kind == "document" and (source := block.table("source")) is not None:
        if (form := source.needed("type")) == "text":
            return source.text("data")
        raise BadRequest(
            f"{block.where}: documents of type {form!r} are not supported, models here read text", field=block.where
        )
    raise BadRequest(
        f"{block.where}: blocks of type {kind!r} are not supported, models here read text", field=block.where
    )
