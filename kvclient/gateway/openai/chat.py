"""`POST /v1/chat/completions`: the request, translated."""

from __future__ import annotations

from typing import Any

from kvclient.errors import BadRequest
from kvclient.gateway.ask import Ask
from kvclient.gateway.fields import Fields
from kvclient.gateway.openai import conversation
from kvclient.gateway.options import choices, limit, response_format, sampling, stops, template_kwargs


def parse(fields: Fields) -> Ask:
    """Raises BadRequest, details.field naming the field."""
    fields.without("functions", "use tools")
    fields.without("function_call", "use tool_choice")
    fields.without("audio", "models here write text")
    fields.without("web_search_options", "the daemon has no tools of its own")
    if fields.any("modalities") not in (None, ["text"]):
        raise BadRequest("modalities must be [\"text\"]", field="modalities")
    body: dict[str, Any] = {"messages": conversation.messages_of(fields), **sampling(fields)}
    tools = conversation.tools_of(fields)
    conversation.with_tools(
        body, tools, conversation.choice_of(fields, [tool["function"]["name"] for tool in tools])
    )
    newer, older = limit(fields, "max_completion_tokens"), limit(fields, "max_tokens")
    if (most := older if newer is None else newer) is not None:
        body["max_tokens"] = most
    if found := stops(fields, "stop"):
        body["stop"] = found
    if (shape := response_format(fields)) is not None:
        body["response_format"] = shape
    if kwargs := template_kwargs(fields, fields.text("reasoning_effort")):
        body["template_kwargs"] = kwargs
    n = choices(fields, body)
    tops = _tops(fields)
    if tops is not None:
        body |= {"logprobs": True, "top_logprobs": tops}
    stream, usage = stream_of(fields)
    return Ask(fields.text("model"), [body], n, stream, usage, tops=tops)


def _tops(fields: Fields) -> int | None:
    tops = fields.integer("top_logprobs")
    if not fields.flag("logprobs"):
        if tops:
            raise BadRequest("top_logprobs needs logprobs", field="top_logprobs")
        return None
    if tops is not None and not 0 <= tops <= 20:
        raise BadRequest(f"top_logprobs must be 0 to 20, got {tops}", field="top_logprobs")
    return tops or 0


def stream_of(fields: Fields) -> tuple[bool, bool]:
    """(stream, usage at its end)."""
    options = fields.table("stream_options")
    usage = False
    if options is not None:
        usage = options.flag("include_usage")
    return fields.flag("stream"), usage
