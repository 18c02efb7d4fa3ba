"""What the streams of chat and of raw completions have in common: how they wait, end and fail."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from kvclient.errors import KvdError
from kvclient.events import Completion, Event
from kvclient.gateway.ask import Ask
from kvclient.gateway.openai.errors import error_body
from kvclient.gateway.openai.usage import usage
from kvclient.gateway.problems import status_of
from kvclient.gateway.shape import about, comment, to_json

DONE = b"data: [DONE]\n\n"


class ChunkStream(ABC):
    """The finish reason goes out when the text has ended; `usage` alone waits for the end of the request.

    `top`: what every chunk carries. `choices`: how many are open.
    """

    def __init__(self, ask: Ask, top: dict[str, Any], choices: int) -> None:
        self.ask = ask
        self._chunk_top = top
        self._open = set(range(choices))
        self.complete = False

    def keep_alive(self, event: Event) -> bytes:
        return comment(event)

    def end(self, done: Completion) -> bytes:
        if self.complete:
            return b""
        late = [choice for choice in done.choices if choice.index in self._open]
        parts = [self._finish(choice.index, choice.finish_reason) for choice in late]
        if self.ask.usage:
            last = {**self._chunk_top, "choices": [], "usage": usage(done.stats), "kvd": about(done.stats, self.ask)}
            parts.append(f"data: {to_json(last)}\n\n".encode())
        self.complete = True
        return b"".join(parts) + (DONE if self.ask.usage else b"")

    def fail(self, problem: KvdError) -> bytes:
        return f"data: {to_json(error_body(problem, status_of(problem)))}\n\n".encode()

    @abstractmethod
    def _finish(self, index: int, reason: str) -> bytes:
        """The chunk that ends a choice, which is open no longer."""
