"""The blocking client."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import zmq

from kvclient import calls, paths, start
from kvclient.calls import Call, ExplainOptions, InputOptions, WarmOptions
from kvclient.core import Request
from kvclient.errors import Cancelled, Unreachable
from kvclient.events import Completion, Event, Stats
from kvclient.fields import Options
from kvclient.hub import Hub
from kvclient.link import Exchange

T = TypeVar("T")
OnEvent = Callable[[Event], None]


class Stream:
    """The events of one request, as an iterator; the last is `done`. One thread at a time may use it.

    Leaving before the end cancels the request: by `close`, the end of a `with` block, an exception or Ctrl-C out of
    `next`, or just dropping it. `id` names the request for `Client.cancel`."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.id = exchange.request.id

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        event = wait(self._exchange)
        if event is None:
            raise StopIteration
        return event

    def close(self) -> None:
        self._exchange.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if exchange := getattr(self, "_exchange", None):
            exchange.close()


def wait(exchange: Exchange) -> Event | None:
    """The next event, None at the end. Whatever else happens the exchange is closed."""
    with exchange.lock:
        try:
            while (event := exchange.poll()) is None and not exchange.finished:
                poller = zmq.Poller()
                for one in exchange.sockets:
                    poller.register(one, zmq.POLLIN)
                poller.poll(math.ceil(exchange.wait_s() * 1000))
        except zmq.ContextTerminated:
            exchange.close()
            raise Cancelled("the client was closed") from None
        except BaseException:
            exchange.close()
            raise
        return event


class Client:
    """A client of the daemon at `socket` (default: `KVD_SOCKET`, else under `KVD_HOME`).

    Threads may share it: every call and every stream has its own connection. `close` cancels what still runs; calls
    that wait in other threads end with Cancelled. A client does not survive a fork. Making one talks to nobody: a
    missing daemon shows at the first call as Unreachable, unless it may be started (`kvclient.start`); `report` gets
    what happens then, a line at a time, on stderr by default. `autostart` False: it is not, whatever the user allowed.

    Every call raises KvdError: BadRequest before anything is sent, Unreachable when the daemon is gone or falls silent,
    and the daemon's own errors."""

    def __init__(
        self, socket: str | Path | None = None, *, report: start.Report | None = None, autostart: bool = True
    ) -> None:
        self.socket = paths.socket_path() if socket is None else paths.checked(Path(socket).expanduser().absolute())
        self._report, self._autostart = report, autostart
        self._hub = Hub(self.socket)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._hub.close()

    def generate(
        self, model: str | None, prompt: str | None = None, *, request_id: str | None = None, **options: Unpack[Options]
    ) -> Completion:
        """The whole answer. `model` None is the daemon's default; exactly one of `prompt` (raw text), `tokens` and
        `messages` is read. `request_id` (up to 64 characters, yours to make unique) lets another thread cancel it."""
        with self.stream(model, prompt, request_id=request_id, **options) as stream:
            for event in stream:
                if event.done is not None:
                    return event.done
        raise Cancelled("the client was closed", id=stream.id)

    def stream(
        self, model: str | None, prompt: str | None = None, *, request_id: str | None = None, **options: Unpack[Options]
    ) -> Stream:
        """As `generate`, event by event. The request is under way when this returns."""
        return Stream(self._open(calls.generate(model, prompt, request_id, options)))

    def models(self, model: str | None = None) -> list[dict[str, Any]]:
        """Those that are here, loaded or not; with `model` only the one that this name or alias leads to."""
        return self._call(calls.models(model))

    def load(
        self, model: str, *, kv: str | None = None, pin: bool | None = None, ttl_s: float | None = None,
        on_event: OnEvent | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Returns when the model is ready. `kv`: a precision preset; `ttl_s`: unload after that many idle seconds."""
        return self._call(calls.load(model, kv, pin, ttl_s), on_event)

    def unload(self, model: str) -> dict[str, Any]:
        return self._call(calls.unload(model))

    def status(self) -> dict[str, Any]:
        return self._call(calls.status())

    def warm(
        self, model: str | None, prompt: str | None = None, *, on_event: OnEvent | None = None,
        **options: Unpack[WarmOptions],
    ) -> Stats:  # fmt: skip
        """Computes and stores the KV of a prompt, generates nothing. `on_event` gets the prefill's progress."""
        return self._call(calls.warm(model, prompt, options), on_event)

    def explain(
        self, model: str | None, prompt: str | None = None, **options: Unpack[ExplainOptions]
    ) -> dict[str, Any]:
        """What of this prompt is cached, and where it first differs from what is stored. Computes nothing."""
        return self._call(calls.explain(model, prompt, options))

    def count(self, model: str | None, prompt: str | None = None, **options: Unpack[InputOptions]) -> int:
        """Tokens of the prompt."""
        return self._call(calls.count(model, prompt, options))

    def cancel(self, request_id: str) -> bool:
        """Ends a request of any client of this daemon; False if none with this id is live."""
        return self._call(calls.cancel(request_id))

    def cache(self, verb: str, *, on_event: OnEvent | None = None, **options: Any) -> dict[str, Any]:
        """A verb of the store: stats, ls, verify, gc, clear, rebuild, export, import, pin, unpin."""
        return self._call(calls.cache(verb, options), on_event)

    def reload(self) -> dict[str, Any]:
        """The daemon reads its configuration again; what can change live does."""
        return self._call(calls.reload())

    def ping(self) -> float:
        """Seconds until the control lane answered."""
        began = time.perf_counter()
        self._call(calls.ping())
        return time.perf_counter() - began

    def shutdown(self, drain_s: float | None = None) -> dict[str, Any]:
        """Stops the daemon; what runs has `drain_s` seconds to end. Returns when it has answered or is gone."""
        return self._call(calls.shutdown(drain_s), may_start=False)

    def _call(self, call: Call[T], on_event: OnEvent | None = None, *, may_start: bool = True) -> T:
        exchange = self._open(call.request, may_start)
        try:
            while (event := wait(exchange)) is not None:
                if on_event is not None:
                    on_event(event)
        finally:
            exchange.close()
        return call.answer(exchange.result())

    def _open(self, asked: Request, may_start: bool = True) -> Exchange:
        try:
            return Exchange(self._hub, asked)
        except Unreachable as problem:
            if not (may_start and self._autostart and may_be_started(problem, self.socket)):
                raise
            with start.starting(self.socket, self._report) as starting:
                while not starting.ready():
                    time.sleep(start.POLL_S)
            return Exchange(self._hub, asked)


def may_be_started(problem: Unreachable, socket: Path) -> bool:
    """Only a daemon that is simply not there, at the place where one of this home would be."""
    return bool(problem.details.get("absent")) and socket == paths.socket_path() and start.allowed(paths.home())
