"""Tools for models whose chat template knows none: described in the system message, called as JSON between tags.

The wording is the one most open models were trained on; models with a template of their own never come here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvclient.errors import BadRequest

START: Final = "<tool_call>"
END: Final = "</tool_call>"
_INSTRUCTIONS: Final = """You can call functions. Their signatures as JSON schemas, one a line:

<tools>
{tools}
</tools>

To call a function, answer with a JSON object of its name and arguments between tags, and nothing else:

<tool_call>
{{"name": <function name>, "arguments": <object of arguments>}}
</tool_call>"""


def described(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages that a template without tools can render: instructions in the system message, calls and results as
    text. The same tools give the same text, so conversations share their prefix."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False, sort_keys=True) for tool in tools)
    instructions = _INSTRUCTIONS.format(tools=lines)
    plain = [_as_text(message) for message in messages]
    if not tools:
        return plain
    if plain[0]["role"] == "system":
        own = plain[0]["content"]
        return [{"role": "system", "content": f"{own}\n\n{instructions}" if own else instructions}, *plain[1:]]
    return [{"role": "system", "content": instructions}, *plain]


def parse_call(text: str, tools: Any = None) -> Any:
    """As mlx-lm's parsers: {"name", "arguments"}; raises ValueError for text that is no call."""
    return json.loads(text.strip())


def chosen(tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Tools of which one must be called; none for "auto". Raises BadRequest for a name that is not among them."""
    if isinstance(choice, str):
        return list(tools) if choice == "required" else []
    function = choice.get("function")
    name = (function if isinstance(function, dict) else choice).get("name")
    found = [tool for tool in tools if (tool.get("function") or {}).get("name") == name]
    if not found:
        raise BadRequest(f"tool_choice names {name!r}, which is not among the tools", field="tool_choice")
    return found


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [_call_text(call) for call in message.get("tool_calls") or ()]
    return {"role": message["role"], "content": "\n".join(filter(None, [message["content"], *calls]))}


def _call_text(call: Mapping[str, Any]) -> str:
    function = call["function"]
    body = {"name": function.get("name"), "arguments": function.get("arguments", {})}
    return f"{START}\n{json.dumps(body, ensure_ascii=False)}\n{END}"
