"""`message` and its stream events."""

from __future__ import annotations

import json
from typing import Any, Final

from kvclient.errors import KvdError
from kvclient.events import Choice, Completion, Event, Stats, ToolCall
from kvclient.gateway.anthropic.errors import error_body
from kvclient.gateway.ask import Ask
from kvclient.gateway.problems import status_of
from kvclient.gateway.shape import about, to_json

REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "cancelled": "end_turn"}


def usage(stats: Stats) -> dict[str, Any]:
    """The prompt in three parts that add up: read from the cache, written to the store, neither."""
    written = max(0, min(stats.stored_tokens, stats.prompt_tokens) - stats.cached_tokens)
    return {
        "input_tokens": stats.prompt_tokens - stats.cached_tokens - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": stats.cached_tokens,
        "output_tokens": stats.completion_tokens,
    }


class MessageReply:
    """Blocks are opened and closed as kinds of text follow each other. `stop_reason` goes out in a first
    `message_delta` when the text has ended; a second one repeats it with the usage (all counts are cumulative)."""

    def __init__(self, ask: Ask, id: str) -> None:
        self.ask = ask
        self.id = id
        self._index = -1
        self._block = ""
        self._stopped = False
        self.complete = False

    def begin(self, event: Event) -> bytes:
        at = event.progress
        known = {"input_tokens": at.total - at.cached if at else 0, "cache_read_input_tokens": at.cached if at else 0}
        start = {**self._message(), "usage": {**known, "cache_creation_input_tokens": 0, "output_tokens": 0}}
        return _sse("message_start", {"message": start}) + _sse("ping", {})

    def event(self, event: Event) -> bytes:
        if event.kind == "text":
            return self._to("text") + self._delta({"type": "text_delta", "text": event.text})
        if event.kind == "reasoning":
            return self._to("thinking") + self._delta({"type": "thinking_delta", "thinking": event.text})
        if event.tool_call is not None:
            return self._call(event.tool_call)
        if event.finish_reason is not None:
            return self._stop(event.finish_reason, event.stop_sequence)
        return b""

    def keep_alive(self, event: Event) -> bytes:
        return _sse("ping", {})

    def end(self, done: Completion) -> bytes:
        choice = done.choices[0]
        first = b"" if self._stopped else self._stop(choice.finish_reason, choice.stop_sequence)
        last = {"delta": self._reason(choice.finish_reason, choice.stop_sequence), "usage": usage(done.stats)}
        last["kvd"] = about(done.stats, self.ask)
        self.complete = True
        return first + _sse("message_delta", last) + _sse("message_stop", {})

    def fail(self, problem: KvdError) -> bytes:
        return _sse("error", error_body(problem, status_of(problem), self.id))

    def whole(self, done: Completion) -> dict[str, Any]:
        choice = done.choices[0]
        return {
            **self._message(),
            "content": _content(choice),
            **self._reason(choice.finish_reason, choice.stop_sequence),
            "usage": usage(done.stats),
            "kvd": about(done.stats, self.ask),
        }

    def _message(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self.id}", "type": "message", "role": "assistant", "model": self.ask.model,
            "content": [], "stop_reason": None, "stop_sequence": None,
        }

    def _reason(self, reason: str, stop: str | None) -> dict[str, Any]:
        if reason == "stop" and stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": REASONS.get(reason, reason), "stop_sequence": None}

    def _to(self, kind: str) -> bytes:
        """Open a block of `kind` unless one is open."""
        if self._block == kind:
            return b""
        return self._open(kind, {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))

    def _open(self, kind: str, block: dict[str, Any]) -> bytes:
        closed = self._close()
        self._index += 1
        self._block = kind
        return closed + _sse("content_block_start", {"index": self._index, "content_block": block})

    def _close(self) -> bytes:
        if not self._block:
            return b""
        # Clients send thinking back with its signature; it means nothing here, but they want one.
        signature = self._delta({"type": "signature_delta", "signature": "kvd"}) if self._block == "thinking" else b""
        self._block = ""
        return signature + _sse("content_block_stop", {"index": self._index})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _sse("content_block_delta", {"index": self._index, "delta": delta})

    def _call(self, call: ToolCall) -> bytes:
        opened = self._open("tool_use", {"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        return opened + self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _stop(self, reason: str, stop: str | None) -> bytes:
        self._stopped = True
        closed = self._close()
        return closed + _sse("message_delta", {"delta": self._reason(reason, stop), "usage": {"output_tokens": 0}})


def _content(choice: Choice) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if choice.reasoning:
        found.append({"type": "thinking", "thinking": choice.reasoning, "signature": "kvd"})
    if choice.text:
        found.append({"type": "text", "text": choice.text})
    for call in choice.tool_calls:
        found.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)})
    return found


def _input(arguments: str) -> Any:
    """A call's arguments as an object; text that is not one is kept whole rather than lost."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {"arguments": arguments}
    return value if isinstance(value, dict) else {"arguments": value}


def _sse(kind: str, body: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {to_json({'type': kind, **body})}\n\n".encode()
