"""`text_completion` and its chunks."""

from __future__ import annotations

from typing import Any

from kvclient.events import Completion, Event
from kvclient.gateway.ask import Ask
from kvclient.gateway.openai.stream import DONE, ChunkStream
from kvclient.gateway.openai.usage import text_logprobs, usage
from kvclient.gateway.shape import about, to_json


class CompletionsReply(ChunkStream):
    """Reasoning is part of a raw completion's text: nothing splits it off here."""

    def __init__(self, ask: Ask, id: str, created: int) -> None:
        self._top = {"id": f"cmpl-{id}", "object": "text_completion", "created": created, "model": ask.model}
        super().__init__(ask, self._top, ask.n * len(ask.bodies))
        self._lengths: dict[int, int] = {}

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
