"""The asyncio client: the same verbs as `Client`, awaited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import zmq

from kvclient import calls, paths, start
from kvclient.calls import Call, ExplainOptions, InputOptions, WarmOptions
from kvclient.client import OnEvent, may_be_started
from kvclient.core import Request
from kvclient.errors import Cancelled, Unreachable
from kvclient.events import Completion, Event, Stats
from kvclient.fields import Options
from kvclient.hub import Hub
from kvclient.link import Exchange

T = TypeVar("T")
FAR_BEHIND = 1000
"""events"""


class AsyncStream:
    """The events of one request, for `async for`; the last is `done`. One task at a time may use it. The request goes
    out at the first event asked for, or on entering an `async with`.

    Leaving before the end cancels the request: by `aclose`, the end of an `async with` block, an exception or the
    task's cancellation, or just dropping it. `id` names the request for `AsyncClient.cancel`."""

    def __init__(self, asked: Request, send: Callable[[Request], Awaitable[Exchange]]) -> None:
        self._request, self._send = asked, send
        self._exchange: Exchange | None = None
        self._reader: _Reader | None = None
        self._closed = False
        self.id = asked.id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._closed:
            raise StopAsyncIteration
        event = await (self._reader or await self._start()).wait()
        if event is None:
            raise StopAsyncIteration
        return event

    async def aclose(self) -> None:
        self._close()

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._close()

    def __del__(self) -> None:
        self._close()

    async def _start(self) -> _Reader:
        self._exchange = self._exchange or await self._send(self._request)
        self._reader = self._reader or _Reader(self._exchange)
        return self._reader

    def _close(self) -> None:
        self._closed = True
        if self._exchange is not None:
            self._exchange.close()


class _Reader:
    """Takes in what comes for an exchange while a loop runs, and wakes the task that waits for it. Descriptors stay
    registered between waits; only a reader that falls far behind is left to ZeroMQ's own limits."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._loop = asyncio.get_running_loop()
        self._descriptors: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: asyncio.Future[None] | None = None
        exchange.on_close = self._stop

    async def wait(self) -> Event | None:
        """The next event, None at the end. Whatever else happens, the task's cancellation included, the exchange is
        closed."""
        exchange = self._exchange
        try:
            while (event := exchange.poll()) is None and not exchange.finished:
                self._waiting = self._loop.create_future()
                self._start()
                await self._waiting
        except BaseException:
            exchange.close()
            raise
        finally:
            self._waiting = None
        return event

    def _start(self) -> None:
        sources = self._exchange.sockets
        for one in sources[len(self._descriptors):]:
            self._descriptors.append(int(one.getsockopt(zmq.FD)))
            self._loop.add_reader(self._descriptors[-1], self._wake)
        if self._timer is None:
            self._timer = self._loop.call_later(self._exchange.wait_s(), self._late)

    def _late(self) -> None:
        self._timer = None
        self._wake()

    def _wake(self) -> None:
        self._exchange.pump()
        if not self._exchange.open or self._exchange.backlog > FAR_BEHIND:
            self._stop()
            return
        self._start()
        if self._exchange.backlog:
            self._tell()

    def _tell(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _stop(self) -> None:
        """Until the next wait."""
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)
        self._descriptors.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._tell()


class AsyncClient:
    """`Client` for asyncio. It belongs to one event loop; tasks may share it, each call and stream has its own
    connection. `aclose` cancels what still runs. Raises what `Client` raises."""

    def __init__(
        self, socket: str | Path | None = None, *, report: start.Report | None = None, autostart: bool = True
    ) -> None:
        self.socket = paths.socket_path() if socket is None else paths.checked(Path(socket).expanduser().absolute())
        self._report, self._autostart = report, autostart
        self._hub = Hub(self.socket)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Calls that other tasks still wait for end with Cancelled."""
        for exchange in self._hub.running():
            exchange.close()
        await asyncio.to_thread(self._hub.close)

    async def generate(
        self, model: str | None, prompt: str | None = None, *, request_id: str | None = None, **options: Unpack[Options]
    ) -> Completion:
        async with self.stream(model, prompt, request_id=request_id, **options) as stream:
            async for event in stream:
                if event.done is not None:
                    return event.done
        raise Cancelled("the client was closed", id=stream.id)

    def stream(
        self, model: str | None, prompt: str | None = None, *, request_id: str | None = None, **options: Unpack[Options]
    ) -> AsyncStream:
        """Not awaited itself: `async for event in kv.stream(…)`. A bad request is refused here."""
        return AsyncStream(calls.generate(model, prompt, request_id, options), self._open)

    async def models(self, model: str | None = None) -> list[dict[str, Any]]:
        return await self._call(calls.models(model))

    async def load(
        self, model: str, *, kv: str | None = None, pin: bool | None = None, ttl_s: float | None = None,
        on_event: OnEvent | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        return await self._call(calls.load(model, kv, pin, ttl_s), on_event)

    async def unload(self, model: str) -> dict[str, Any]:
        return await self._call(calls.unload(model))

    async def status(self) -> dict[str, Any]:
        return await self._call(calls.status())

    async def warm(
        self, model: str | None, prompt: str | None = None, *, on_event: OnEvent | None = None,
        **options: Unpack[WarmOptions],
    ) -> Stats:  # fmt: skip
        return await self._call(calls.warm(model, prompt, options), on_event)

    async def explain(
        self, model: str | None, prompt: str | None = None, **options: Unpack[ExplainOptions]
    ) -> dict[str, Any]:
        return await self._call(calls.explain(model, prompt, options))

    async def count(self, model: str | None, prompt: str | None = None, **options: Unpack[InputOptions]) -> int:
        return await self._call(calls.count(model, prompt, options))

    async def cancel(self, request_id: str) -> bool:
        return await self._call(calls.cancel(request_id))

    async def cache(self, verb: str, *, on_event: OnEvent | None = None, **options: Any) -> dict[str, Any]:
        return await self._call(calls.cache(verb, options), on_event)

    async def reload(self) -> dict[str, Any]:
        return await self._call(calls.reload())

    async def ping(self) -> float:
        began = time.perf_counter()
        await self._call(calls.ping())
        return time.perf_counter() - began

    async def shutdown(self, drain_s: float | None = None) -> dict[str, Any]:
        return await self._call(calls.shutdown(drain_s), may_start=False)

    async def _call(self, call: Call[T], on_event: OnEvent | None = None, *, may_start: bool = True) -> T:
        exchange = await self._open(call.request, may_start)
        reader = _Reader(exchange)
        try:
            while (event := await reader.wait()) is not None:
                if on_event is not None:
                    on_event(event)
        finally:
            exchange.close()
        return call.answer(exchange.result())

    async def _open(self, asked: Request, may_start: bool = True) -> Exchange:
        try:
            return Exchange(self._hub, asked)
        except Unreachable as problem:
            if not (may_start and self._autostart and may_be_started(problem, self.socket)):
                raise
            with start.starting(self.socket, self._report) as starting:
                while not starting.ready():
                    await asyncio.sleep(start.POLL_S)
            return Exchange(self._hub, asked)
