"""The `response` object and its stream events."""

from __future__ import annotations

from typing import Any

from kvclient.errors import KvdError
from kvclient.events import Completion, Event, TokenLogprob
from kvclient.gateway.ask import Ask
from kvclient.gateway.openai.errors import error_body
from kvclient.gateway.openai.usage import response_logprobs, response_usage
from kvclient.gateway.problems import status_of
from kvclient.gateway.shape import about, comment, to_json


class ResponsesReply:
    """Output items are opened and closed as kinds of text follow each other; all are closed when the text has ended,
    `response.completed` alone waits for the end of the request."""

    def __init__(self, ask: Ask, id: str, created: int) -> None:
        self.ask = ask
        self.id = id
        self.created = created
        self._number = -1
        self._output: list[dict[str, Any]] = []
        self._open = ""
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self.complete = False

    def begin(self, event: Event) -> bytes:
        response = self._response("in_progress", [])
        return self._sse("response.created", response=response) + self._sse("response.in_progress", response=response)

    def event(self, event: Event) -> bytes:
        if event.kind == "text":
            opened = b"" if self._open == "message" else self._begin_message()
            self._text.append(event.text)
            self._logprobs.extend(event.logprobs)
            found = response_logprobs(event.logprobs, self.ask.tops or 0)
            return opened + self._at("response.output_text.delta", delta=event.text, logprobs=found)
        if event.kind == "reasoning":
            item = {"type": "reasoning", "summary": [], "content": []}
            opened = b"" if self._open == "reasoning" else self._begin_item(item)
            self._text.append(event.text)
            return opened + self._at("response.reasoning_text.delta", delta=event.text)
        if event.tool_call is not None:
            call = {"call_id": event.tool_call.id, "name": event.tool_call.name, "arguments": ""}
            opened = self._begin_item({"type": "function_call", **call, "status": "in_progress"})
            self._text.append(event.tool_call.arguments)
            return opened + self._item("response.function_call_arguments.delta", delta=event.tool_call.arguments)
        if event.finish_reason is not None:
            return self._close(_status(event.finish_reason))
        return b""

    def keep_alive(self, event: Event) -> bytes:
        return comment(event)

    def end(self, done: Completion) -> bytes:
        status = _status(done.choices[0].finish_reason)
        closed = self._close(status)
        response = self._finished(done, self._output)
        self.complete = True
        return closed + self._sse(f"response.{status}", response=response)

    def fail(self, problem: KvdError) -> bytes:
        error = error_body(problem, status_of(problem))["error"]
        response = {
            **self._response("failed", self._output),
            "error": {"code": error["code"] or "server_error", "message": error["message"]},
        }
        return self._sse("response.failed", response=response)

    def whole(self, done: Completion) -> dict[str, Any]:
        choice = done.choices[0]
        if choice.reasoning:
            self.event(Event("reasoning", self.id, text=choice.reasoning))
        if choice.text or not choice.tool_calls:
            self.event(Event("text", self.id, text=choice.text, logprobs=choice.logprobs))
        for call in choice.tool_calls:
            self.event(Event("tool_call", self.id, tool_call=call))
        self._close(_status(choice.finish_reason))
        return self._finished(done, self._output)

    def _finished(self, done: Completion, output: list[dict[str, Any]]) -> dict[str, Any]:
        choice = done.choices[0]
        response = self._response(_status(choice.finish_reason), output)
        if choice.finish_reason == "length":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return {**response, "usage": response_usage(done.stats), "kvd": about(done.stats, self.ask)}

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"resp_{self.id}", "object": "response", "created_at": self.created, "status": status, "error": None,
            "incomplete_details": None, "instructions": None, "max_output_tokens": None, "metadata": {},
            "model": self.ask.model, "output": list(output), "parallel_tool_calls": True, "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None}, "store": False, "temperature": None,
            "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_p": None,
            "truncation": "disabled", "usage": None, "user": None, **self.ask.request,
        }

    def _begin_item(self, item: dict[str, Any]) -> bytes:
        closed = self._close()
        self._open = item["type"]
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[self._open]
        self._output.append({"id": f"{prefix}_{self.id}_{len(self._output)}", **item})
        index = len(self._output) - 1
        return closed + self._sse("response.output_item.added", output_index=index, item=self._output[-1])

    def _begin_message(self) -> bytes:
        opened = self._begin_item({"type": "message", "role": "assistant", "status": "in_progress", "content": []})
        return opened + self._at("response.content_part.added", part=self._part(""))

    def _close(self, status: str = "completed") -> bytes:
        """Close the open item with its whole text."""
        if not self._open:
            return b""
        kind, self._open = self._open, ""
        text = "".join(self._text)
        self._text = []
        item = self._output[-1]
        if kind == "message":
            part = self._part(text)
            item |= {"status": status, "content": [part]}
            ended = self._at("response.output_text.done", text=text, logprobs=part["logprobs"])
            ended += self._at("response.content_part.done", part=part)
        elif kind == "reasoning":
            item["content"] = [{"type": "reasoning_text", "text": text}]
            ended = self._at("response.reasoning_text.done", text=text)
        else:
            item |= {"status": status, "arguments": text}
            ended = self._item("response.function_call_arguments.done", name=item["name"], arguments=text)
        self._logprobs = []
        return ended + self._sse("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _part(self, text: str) -> dict[str, Any]:
        found = response_logprobs(self._logprobs, self.ask.tops or 0)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": found}

    def _item(self, kind: str, **fields: Any) -> bytes:
        return self._sse(kind, item_id=self._output[-1]["id"], output_index=len(self._output) - 1, **fields)

    def _at(self, kind: str, **fields: Any) -> bytes:
        return self._item(kind, content_index=0, **fields)

    def _sse(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return f"event: {kind}\ndata: {to_json({'type': kind, 'sequence_number': self._number, **fields})}\n\n".encode()


def _status(finish_reason: str) -> str:
    return "incomplete" if finish_reason == "length" else "completed"
