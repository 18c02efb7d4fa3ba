"""What comes back for a request, as frozen values: events while it runs, a Completion at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvclient.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class Progress:
    """Prefill so far, in tokens: `done` of `total`, of which `cached` were not computed."""

    done: int
    total: int
    cached: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """`logprob` is a natural logarithm; `top` holds the likeliest tokens at this position, itself perhaps not among
    them. `token` is the token's own text, U+FFFD where it is only part of a character."""

    id: int
    token: str
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt first differs from what is stored: at token number `token`, `text` against `stored_text`."""

    token: int
    text: str = ""
    stored_text: str = ""


@dataclass(frozen=True, slots=True)
class Stats:
    """What a request cost and what it did not: tokens, seconds and bytes.

    `cached_tokens + computed_tokens == prompt_tokens`; `computed_tokens` are the rows fed to the model in prefill.
    `stored_tokens`: leading tokens of prompt + answer that survive a crash. `other` holds what a newer daemon adds."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_memory_tokens: int = 0
    cached_ssd_tokens: int = 0
    computed_tokens: int = 0
    completion_tokens: int = 0
    stored_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    kv_bytes: int = 0
    first_divergence: Divergence | None = None
    miss_reason: str | None = None
    peak_memory_bytes: int = 0
    recomputed_tokens: int = 0
    kv_precision: str = ""
    load_s: float = 0.0
    out_of_memory: Mapping[str, Any] | None = None
    other: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_wire(cls, body: Mapping[str, Any]) -> Stats:
        known = {f.name for f in fields(cls)} - {"other", "first_divergence"}
        given = {name: value for name, value in body.items() if name in known and value is not None}
        other = {name: value for name, value in body.items() if name not in known and name != "first_divergence"}
        return cls(**given, first_divergence=divergence(body.get("first_divergence")), other=other)

    def to_wire(self) -> dict[str, Any]:
        """Plain values for JSON or msgpack, `other` merged in."""
        plain: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "other"}
        at = self.first_divergence
        plain["first_divergence"] = at and {"token": at.token, "text": at.text, "stored_text": at.stored_text}
        return {**plain, **self.other}


@dataclass(frozen=True, slots=True)
class Choice:
    """One of `n` answers. `finish_reason`: "stop", "length", "tool_calls" or "cancelled"; `stop_sequence` is the stop
    string that ended the text, if one did."""

    index: int
    text: str
    finish_reason: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    stop_sequence: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A request's end. `choices` are ordered by index; the properties speak of the first. `model`: the name of the
    model that answered, "" from a daemon that does not say it."""

    id: str
    choices: tuple[Choice, ...]
    stats: Stats
    model: str = ""

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason

    @property
    def reasoning(self) -> str:
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.choices[0].tool_calls

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return self.choices[0].logprobs


@dataclass(frozen=True, slots=True)
class Event:
    """One step of a request. Which fields are set goes by `kind`; skip kinds you do not know.

    queued      `position` in the waiting line (0: next)
    progress    `progress` of the prefill
    text        `text` of choice `index`, with `logprobs` if asked for
    reasoning   `text` of the model's thinking
    tool_call   `tool_call`, complete
    finish      `finish_reason`, `stop_sequence`: choice `index` has all its text (storing may go on)
    done        `done`: the Completion; the last event

    `model`: the name of the model that answers, with `queued` and `progress`; "" from a daemon that does not say it.
    """

    kind: str
    id: str
    index: int = 0
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    position: int | None = None
    progress: Progress | None = None
    tool_call: ToolCall | None = None
    finish_reason: str | None = None
    stop_sequence: str | None = None
    done: Completion | None = None
    model: str = ""


def divergence(body: Mapping[str, Any] | None) -> Divergence | None:
    if not body:
        return None
    return Divergence(int(body["token"]), str(body.get("text") or ""), str(body.get("stored_text") or ""))


def tool_call(body: Mapping[str, Any]) -> ToolCall:
    return ToolCall(str(body["id"]), str(body["name"]), str(body["arguments"]))


def logprobs(body: Any) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(int(one["id"]), str(one["token"]), float(one["logprob"]), logprobs(one.get("top")))
        for one in body or ()
    )


def event(kind: str, id: str, body: Mapping[str, Any]) -> Event | None:
    """The event of one reply other than `done`, `error` and `result`; None for a kind not known here (a newer
    daemon's). Raises ProtocolError when a field is missing or has the wrong type."""
    try:
        return _event(kind, id, body)
    except (KeyError, TypeError, ValueError) as problem:
        raise ProtocolError(f"malformed {kind} event: {type(problem).__name__} {problem}", kind=kind, id=id) from None


def _event(kind: str, id: str, body: Mapping[str, Any]) -> Event | None:
    index = int(body.get("index", 0))
    match kind:
        case "queued":
            return Event(kind, id, position=int(body["position"]), model=str(body.get("model") or ""))
        case "progress":
            counts = Progress(int(body["done"]), int(body["total"]), int(body.get("cached", 0)))
            return Event(kind, id, progress=counts, model=str(body.get("model") or ""))
        case "text":
            return Event(kind, id, index, str(body["text"]), logprobs(body.get("logprobs")))
        case "reasoning":
            return Event(kind, id, index, str(body["text"]))
        case "tool_call":
            return Event(kind, id, index, tool_call=tool_call(body["call"]))
        case "finish":
            reason, stop = str(body["finish_reason"]), body.get("stop_sequence")
            return Event(kind, id, index, finish_reason=reason, stop_sequence=None if stop is None else str(stop))
    return None
