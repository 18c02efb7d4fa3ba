"""`text_completion` and its chunks."""

from __future__ import annotations

from typing import Any

from kvclient.errors import KvdError
from kvclient.events import Completion, Event
from kvclient.gateway.ask import Ask
from kvclient.gateway.openai.chat_reply import DONE
from kvclient.gateway.openai.errors import error_body
from kvclient.gateway.openai.usage import text_logprobs, usage
from kvclient.gateway.problems import status_of
from kvclient.gateway.shape import about, comment, to_json


class CompletionsReply:
    """Reasoning is part of a raw completion's text: nothing splits it off here."""

    def __init__(self, ask: Ask, id: str, created: int) -> None:
        self.ask = ask
        self._top = {"id": f"cmpl-{id}", "object": "text_completion", "created": created, "model": ask.model}
        self._open = set(range(ask.n * len(ask.bodies)))
        self._lengths: dict[int, int] = {}
        self.complete = False

    def begin(self, event: Event) -> bytes:
        if not self.ask.echo:
            return b""
        return b"".join(self._chunk(index, self._echo(index)) for index in sorted(self._open))

    def event(self, event: Event) -> bytes:
        if event.kind in ("text", "reasoning"):
            before = self._lengths.get(event.index, 0)
            self._lengths[event.index] = before + len(event.text)
            return self._chunk(event.index, event.text, text_logprobs(event.logprobs, self.ask.tops, before))
        if event.finish_reason is not None:
            return self._finish(event.index, event.finish_reason)
        return b""

    def keep_alive(self, event: Event) -> bytes:
        return comment(event)

    def end(self, done: Completion) -> bytes:
        if self.complete:
            return b""
        late = [choice for choice in done.choices if choice.index in self._open]
        parts = [self._finish(choice.index, choice.finish_reason) for choice in late]
        if self.ask.usage:
            last = {**self._top, "choices": [], "usage": usage(done.stats), "kvd": about(done.stats, self.ask)}
            parts.append(f"data: {to_json(last)}\n\n".encode())
        self.complete = True
        return b"".join(parts) + (DONE if self.ask.usage else b"")

    def fail(self, problem: KvdError) -> bytes:
        return f"data: {to_json(error_body(problem, status_of(problem)))}\n\n".encode()

    def whole(self, done: Completion) -> dict[str, Any]:
        choices = [
            {
                "index": choice.index,
                "text": self._echo(choice.index) + choice.reasoning + choice.text,
                "logprobs": text_logprobs(choice.logprobs, self.ask.tops, 0),
                "finish_reason": choice.finish_reason,
            }
            for choice in done.choices
        ]
        return {**self._top, "choices": choices, "usage": usage(done.stats), "kvd": about(done.stats, self.ask)}

    def _echo(self, index: int) -> str:
        return self.ask.echo[index // self.ask.n] if self.ask.echo else ""

    def _finish(self, index: int, reason: str) -> bytes:
        self._open.discard(index)
        ended = self._chunk(index, "", reason=reason)
        if self._open or self.ask.usage:
            return ended
        self.complete = True
        return ended + DONE

    def _chunk(self, index: int, text: str, logprobs: Any = None, reason: str | None = None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return f"data: {to_json({**self._top, 'choices': [choice]})}\n\n".encode()
