"""One request, from what the caller asks to its last reply, without a socket or a clock: both clients are thin over
this. A Request is built and checked here; a Reply turns messages into events; a Watch says when waiting has an end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvclient import events, fields, wire
from kvclient.errors import BadRequest, Internal, ProtocolError, Timeout, Unreachable, from_wire
from kvclient.events import Choice, Completion, Event, Stats, TokenLogprob

CONTROL_VERBS: Final = frozenset({"cancel", "ping", "shutdown", "status"})
BEATING_VERBS: Final = frozenset({"generate", "warm"})
"""Verbs for which the daemon owes an event every `wire.BEAT_S`; the others may work in silence."""
SILENCE_S: Final = 4 * wire.BEAT_S
"""After this long without a message the daemon is asked on the control lane whether it lives."""
PONG_S: Final = 4 * wire.BEAT_S
"""How long it has to answer that."""
ORPHAN_S: Final = 60 * wire.BEAT_S
"""A living daemon that says nothing for this long of a request that should beat has lost it."""
GRACE_S: Final = 2 * wire.BEAT_S
"""The daemon ends a request at its `timeout`; the client does so this much later."""


@dataclass(frozen=True, slots=True)
class Request:
    """A checked message. `timeout_s` is the request's own limit."""

    message: wire.Message
    timeout_s: float | None = None

    @property
    def id(self) -> str:
        return self.message.id

    @property
    def verb(self) -> str:
        return self.message.kind

    @property
    def control(self) -> bool:
        return self.verb in CONTROL_VERBS


def request(verb: str, body: Mapping[str, Any], model: str | None = None, id: str | None = None) -> Request:
    """Raises BadRequest for any field that is wrong; `model` None or "" means the daemon's default model."""
    checked = fields.checked(verb, body)
    name = fields.string(fields.MAX_MODEL)("model", model or "")
    if id is not None:
        fields.string(64, empty=False)("request_id", id)
    try:
        packed = wire.pack(checked)
    except (UnicodeEncodeError, OverflowError, TypeError, ValueError, RecursionError) as problem:
        raise BadRequest(f"{verb}: a field cannot be sent: {problem}"[:300]) from None
    if len(packed) > wire.MAX_BODY:
        raise BadRequest(
            f"the request has {len(packed)} bytes, at most {wire.MAX_BODY} can be sent",
            size=len(packed), limit=wire.MAX_BODY,
        )  # fmt: skip
    return Request(wire.Message(verb, id or wire.new_id(), packed, name), checked.get("timeout"))


def received(frames: list[bytes]) -> wire.Message:
    """A reply's message. Raises ProtocolError that says what to do when the daemon is of another version."""
    try:
        return wire.parse(frames)
    except ProtocolError as problem:
        theirs = problem.details.get("theirs")
        if theirs is None:
            raise
        raise ProtocolError(
            f"the daemon speaks protocol {theirs!r}, this kvclient {wire.VERSION}: install one version of both"[:200],
            **problem.details,
        ) from None


class Reply:
    """The replies to one request, fed in order. `open` until a terminal one came; then `completion` (generate) or
    `result` (every other verb) is set, or `feed` has raised the error."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._texts: dict[int, list[str]] = {}
        self._logprobs: dict[int, list[TokenLogprob]] = {}
        self.open = True
        self.result: dict[str, Any] = {}
        self.completion: Completion | None = None

    def feed(self, message: wire.Message) -> Event | None:
        """The message's event, None if it has none for the caller. Raises the typed error of an `error` reply, or
        ProtocolError for a reply that does not belong here."""
        if message.id != self._request.id or not self.open:
            raise ProtocolError(f"{message.kind} for request {message.id}, which is not waiting", id=message.id)
        if message.kind not in wire.TERMINAL:
            event = events.event(message.kind, message.id, message.body)
            if event is not None and event.kind == "text":
                self._texts.setdefault(event.index, []).append(event.text)
                self._logprobs.setdefault(event.index, []).extend(event.logprobs)
            return event
        self.open = False
        if message.kind == "error":
            raise from_wire(message.body)
        if self._request.verb != "generate":
            self.result = message.body
            return None
        if message.kind != "done":
            raise ProtocolError(f"generate ends with done, got {message.kind}", id=message.id)
        self.completion = self._complete(message.body)
        return Event("done", message.id, done=self.completion)

    def _complete(self, body: Mapping[str, Any]) -> Completion:
        try:
            choices = sorted((self._choice(one) for one in body["choices"]), key=lambda choice: choice.index)
            stats = Stats.from_wire(body.get("stats") or {})
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise ProtocolError(f"malformed done: {type(problem).__name__} {problem}", id=self._request.id) from None
        if not choices:
            raise ProtocolError("done without a choice", id=self._request.id)
        return Completion(self._request.id, tuple(choices), stats, str(body.get("model") or ""))

    def _choice(self, body: Mapping[str, Any]) -> Choice:
        index = int(body.get("index", 0))
        text = body.get("text")
        return Choice(
            index,
            "".join(self._texts.get(index, ())) if text is None else str(text),
            str(body["finish_reason"]),
            str(body.get("reasoning") or ""),
            tuple(events.tool_call(call) for call in body.get("tool_calls") or ()),
            tuple(self._logprobs.get(index, ())),
            None if (stop := body.get("stop_sequence")) is None else str(stop),
        )


class Watch:
    """When a wait must end: the request's own limit, a daemon that fell silent. Times are seconds of one monotonic
    clock, given by the caller."""

    def __init__(self, request: Request, socket: str, now: float) -> None:
        self._request, self._socket = request, socket
        self._heard = self._alive = now
        self._pinged: float | None = None
        self._deadline = math.inf if request.timeout_s is None else now + request.timeout_s + GRACE_S

    def heard(self, now: float) -> None:
        """A message for the request came."""
        self._heard = self._alive = now
        self._pinged = None

    def pong(self, now: float) -> None:
        """The daemon lives, though it has nothing to say of the request."""
        self._alive, self._pinged = now, None

    def wakes(self) -> float:
        """When `due` has to be asked next."""
        if self._pinged is not None:
            return min(self._deadline, self._pinged + PONG_S)
        return min(self._deadline, self._alive + SILENCE_S)

    def due(self, now: float) -> bool:
        """Whether a ping has to go out. Raises Timeout or Unreachable when waiting has no more sense."""
        if now >= self._deadline:
            limit = self._request.timeout_s
            raise Timeout(f"no answer within {limit:g} s", limit_s=limit, stage="client")
        if self._pinged is not None:
            if now - self._pinged >= PONG_S:
                raise self._unreachable(now)
            return False
        if now - self._alive < SILENCE_S:
            return False
        if self._request.verb in BEATING_VERBS and now - self._heard >= ORPHAN_S:
            raise Internal(
                f"the daemon lives but has said nothing of this request for {now - self._heard:.0f} s",
                id=self._request.id, silent_s=round(now - self._heard, 1),
            )  # fmt: skip
        self._pinged = now
        return True

    def _unreachable(self, now: float) -> Unreachable:
        return Unreachable(
            f"the daemon at {self._socket} has not answered for {now - self._heard:.0f} s; "
            "see `kvd logs`, or `kvd stop; kvd start`",
            socket=self._socket, silent_s=round(now - self._heard, 1),
        )  # fmt: skip
