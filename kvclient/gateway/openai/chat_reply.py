"""`chat.completion` and its chunks."""

from __future__ import annotations

from typing import Any

from kvclient.events import Choice, Completion, Event
from kvclient.gateway.ask import Ask
from kvclient.gateway.openai.stream import DONE, ChunkStream
from kvclient.gateway.openai.usage import call, chat_logprobs, usage
from kvclient.gateway.shape import about, to_json


class ChatReply(ChunkStream):
    """One chat completion, as a whole or as a stream."""

    def __init__(self, ask: Ask, id: str, created: int) -> None:
        self._top = {"id": f"chatcmpl-{id}", "created": created, "model": ask.model}
        chunk = {**self._top, "object": "chat.completion.chunk", "system_fingerprint": None}
        # A chunk differs from the next in its choices only: what surrounds them is encoded once.
        nothing = {"usage": None} if ask.usage else {}
        self._head = f"data: {to_json(chunk)[:-1]},\"choices\":["
        self._tail = f"]{',' + to_json(nothing)[1:-1] if nothing else ''}}}\n\n"
        super().__init__(ask, {**self._top, "object": "chat.completion.chunk"}, ask.n)
        self._calls: dict[int, int] = {}

    def begin(self, event: Event) -> bytes:
        return b"".join(self._delta(index, {"role": "assistant", "content": ""}) for index in range(self.ask.n))

    def event(self, event: Event) -> bytes:
        if event.kind == "text":
            if self.ask.tops is None:
                inner = f'{{"index":{event.index},"delta":{{"content":{to_json(event.text)}}},"finish_reason":null}}'
                return f"{self._head}{inner}{self._tail}".encode()
            logprobs = chat_logprobs(event.logprobs, self.ask.tops)
            return self._delta(event.index, {"content": event.text}, logprobs=logprobs)
        if event.kind == "reasoning":
            return self._delta(event.index, {"reasoning_content": event.text})
        if event.tool_call is not None:
            return self._call(event.index, call(event.tool_call))
        if event.finish_reason is not None:
            return self._finish(event.index, event.finish_reason)
        return b""

    def whole(self, done: Completion) -> dict[str, Any]:
        return {
            **self._top,
            "object": "chat.completion",
            "choices": [self._choice(choice) for choice in done.choices],
            "usage": usage(done.stats),
            "system_fingerprint": None,
            "kvd": about(done.stats, self.ask),
        }

    def _choice(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.tool_calls:
            message["tool_calls"] = [call(one) for one in choice.tool_calls]
            message["content"] = choice.text or None
        return {
            "index": choice.index,
            "message": message,
            "logprobs": chat_logprobs(choice.logprobs, self.ask.tops),
            "finish_reason": choice.finish_reason,
        }

    def _call(self, index: int, found: dict[str, Any]) -> bytes:
        """Name first, then the arguments, as clients that gather them expect."""
        number = self._calls.get(index, 0)
        self._calls[index] = number + 1
        arguments = found["function"]["arguments"]
        opening = {**found, "index": number, "function": {**found["function"], "arguments": ""}}
        more = {"index": number, "function": {"arguments": arguments}}
        return self._delta(index, {"tool_calls": [opening]}) + self._delta(index, {"tool_calls": [more]})

    def _finish(self, index: int, reason: str) -> bytes:
        self._open.discard(index)
        ended = self._delta(index, {}, reason)
        if self._open or self.ask.usage:
            return ended
        self.complete = True
        return ended + DONE

    def _delta(self, index: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return f"{self._head}{to_json(choice)}{self._tail}".encode()
