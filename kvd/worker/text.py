"""From token ids to text: whole characters only, stop strings across token borders, reasoning and tool calls apart.

Streamed and whole answers go through the same code: whatever is cut where, the pieces join to the same text.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from mlx_lm.generate import TextStateMachine

from kvd.worker import tools as fallback

BROKEN: Final = "\ufffd"
"""what a decoder puts for bytes that are no character (yet)"""


class Tokenizer(Protocol):
    def decode(self, ids: Sequence[int], **options: Any) -> str: ...
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]: ...


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The one way ids become text here: special tokens shown, spaces left as they are."""
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class Detokenizer:
    """Text of a growing list of ids. `push` returns only what later ids cannot change; all pieces and `finish` joined
    are `decode` of all ids.

    Decoders look at their neighbours (a leading space, a run of byte tokens), so each piece is the difference of two
    decodes that start at the same id: `_start` lies one released piece back.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0
        self._released = 0

    def push(self, token: int) -> str:
        self._ids.append(token)
        if self._is_byte(token):
            # A run of byte tokens decodes as a whole: one bad byte turns all of them into replacements.
            return ""
        return self._release(final=False)

    def finish(self) -> str:
        """What was held back; for bytes that are no character the replacement characters of the full decode."""
        return self._release(final=True)

    def _release(self, *, final: bool) -> str:
        before = decode(self._tokenizer, self._ids[self._start : self._released])
        now = decode(self._tokenizer, self._ids[self._start :])
        if not final and (now.endswith(BROKEN) or len(now) <= len(before)):
            return ""
        self._start, self._released = self._released, len(self._ids)
        return now[len(before) :]

    def _is_byte(self, token: int) -> bool:
        name = self._tokenizer.convert_ids_to_tokens([token])[0]
        return isinstance(name, str) and len(name) == 6 and name.startswith("<0x") and name.endswith(">")


class StopFinder:
    """Finds the first of some strings in streamed text. `push` returns (text before it, found)."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None
        """the one that was found"""

    def push(self, text: str) -> tuple[str, bool]:
        if not self._stops:
            return text, False
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:  # the one that is complete first, as if the text came one character at a time
            self._held = ""
            _, at, self.hit = min(found)
            return text[:at], True
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """The beginning of a stop string that never came."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - size :]):
            return size
    return 0


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the answer for the client. `call` ({id, name, arguments}: a JSON text) is set for tool calls only."""

    kind: Literal["text", "reasoning", "tool_call"]
    text: str
    call: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """How a model marks reasoning and tool calls; see `format_of`."""

    machine: TextStateMachine
    initial: str
    tool_start: str = ""
    tool_end: str = ""
    parse: Callable[..., Any] | None = None
    tools: Sequence[Mapping[str, Any]] = ()


PLAIN: Final = Format(TextStateMachine(), "normal")


def format_of(tokenizer: Any, tools: Sequence[Mapping[str, Any]], prompt: Sequence[int]) -> Format:
    """The format of a chat answer: reasoning always, tool calls when the request brought tools: as the model marks
    them, or as `kvd.worker.tools` told it to. A prompt that ends inside an open reasoning tag starts there."""
    normal: list[tuple[str, str]] = []
    states: dict[str, list[tuple[str, str]]] = {"normal": normal}
    initial = "normal"
    if tokenizer.has_thinking:
        normal.append((tokenizer.think_start, "reasoning"))
        states["reasoning"] = [(tokenizer.think_end, "normal")]
        if tokenizer.rfind_think_start(prompt) > tokenizer.rfind_think_end(prompt):
            initial = "reasoning"
    start, end, parser = "", "", None
    if tools and tokenizer.has_tool_calling:
        start, end, parser = tokenizer.tool_call_start, tokenizer.tool_call_end or "", tokenizer.tool_parser
    elif tools:
        start, end, parser = fallback.START, fallback.END, fallback.parse_call
    if parser is not None:
        for edges in list(states.values()):
            edges.append((start, "tool"))
        states["tool"] = [(end, "normal")] if end else []
    normal.extend((marker, "normal") for marker in tokenizer.structural_markers)
    return Format(
        TextStateMachine({state: edges for state, edges in states.items() if edges or state == "tool"}),
        tokenizer.response_initial_state or initial,
        start,
        end,
        parser,
        tools,
    )


class Answer:
    """One choice's text: ids in, pieces out, and everything joined at the end."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), format: Format = PLAIN) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopFinder(stops)
        self._format = format
        self._state = format.machine.make_state(format.initial)
        self._call: list[str] | None = None
        self.stopped = False
        self.text = ""
        self.reasoning = ""
        self.tool_calls: list[Mapping[str, Any]] = []

    @property
    def stop_sequence(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.hit

    def push(self, token: int) -> list[Piece]:
        """Pieces that are certain now. Sets `stopped` when a stop string came; nothing follows it."""
        return self._feed(self._detokenizer.push(token))

    def finish(self) -> list[Piece]:
        """All that was held back. Nothing is lost: an unclosed call that does not parse comes as the text it was."""
        pieces: list[Piece] = []
        if not self.stopped:
            pieces += self._feed(self._detokenizer.finish())
        if not self.stopped:
            pieces += self._split(self._stops.finish())
        self._state, rest, state = TextStateMachine.flush(self._state)
        pieces += self._place(state or "normal", rest)
        return pieces + self._close_call(closed=False)

    def _feed(self, text: str) -> list[Piece]:
        if not text or self.stopped:
            return []
        text, self.stopped = self._stops.push(text)
        return self._split(text)

    def _split(self, text: str) -> list[Piece]:
        if not text:
            return []
        self._state, segments = TextStateMachine.split(self._state, text)
        pieces: list[Piece] = []
        for state, part in segments:
            pieces += self._place(state, part)
        return pieces

    def _place(self, state: str, text: str) -> list[Piece]:
        if state == "tool":
            if self._call is None:
                self._call = []
            self._call.append(text)
            return []
        pieces = self._close_call(closed=True)
        if not text:
            return pieces
        if state == "reasoning":
            self.reasoning += text
            return [*pieces, Piece("reasoning", text)]
        self.text += text
        return [*pieces, Piece("text", text)]

    def _close_call(self, *, closed: bool) -> list[Piece]:
        if self._call is None:
            return []
        body, self._call = "".join(self._call), None
        try:
            calls = _calls(self._format, body)
        except Exception:  # noqa: BLE001  parsers fail in ways of their own (1,500 brackets: RecursionError)
            # Not a call after all (or cut short): it stays what the model wrote.
            raw = self._format.tool_start + body + (self._format.tool_end if closed else "")
            self.text += raw
            return [Piece("text", raw)]
        self.tool_calls += calls
        return [Piece("tool_call", "", call) for call in calls]


def _calls(format: Format, body: str) -> list[Mapping[str, Any]]:
    """Parsed calls, at least one; raises whatever mlx-lm's parsers raise for text that is no call (each has its own
    idea), and TypeError or ValueError for what no client can be sent."""
    if format.parse is None:
        raise ValueError("this model has no tool parser")
    parsed = format.parse(body, list(format.tools))
    found: list[Mapping[str, Any]] = []
    for call in parsed if isinstance(parsed, list) else [parsed]:
        id, name, arguments = call.get("id"), call["name"], call["arguments"]
        if not isinstance(arguments, str):
            # Half a character ("\ud83d") stays the escape it was: a lone surrogate cannot be sent.
            arguments = json.dumps(arguments, ensure_ascii=False).encode(errors="backslashreplace").decode()
        if not isinstance(id, str) or not id:
            id = f"call_{uuid.uuid4().hex[:24]}"
        (id + name + arguments).encode()
        found.append({"id": id, "name": name, "arguments": arguments})
    if not found:
        raise ValueError("no call")
    return found
