"""The asyncio client: the same verbs as `Client`, awaited."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import zmq

from kvclient import calls, paths, start
from kvclient.calls import Call, ExplainOptions, InputOptions, WarmOptions
from kvclient.client import OnEvent, close_all, may_be_started, open_exchange
from kvclient.core import Request
from kvclient.errors import Cancelled, Unreachable
from kvclient.events import Completion, Event
from kvclient.fields import Options
from kvclient.link import Exchange

T = TypeVar("T")


class AsyncStream:
    """The events of one request, for `async for`; the last is `done`. One task at a time may use it. The request goes
    out at the first event asked for, or on entering an `async with`.

    Leaving before the end cancels the request: by `aclose`, the end of an `async with` block, an exception or the
    task's cancellation, or just dropping it. `id` names the request for `AsyncClient.cancel`."""

    def __init__(self, asked: Request, send: Callable[[Request], Awaitable[Exchange]]) -> None:
        self._request, self._send = asked, send
        self._exchange: Exchange | None = None
        self._closed = False
        self.id = asked.id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._closed:
            raise StopAsyncIteration
        event = await wait(self._exchange or await self._start())
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

    async def _start(self) -> Exchange:
        self._exchange = self._exchange or await self._send(self._request)
        return self._exchange

    def _close(self) -> None:
        self._closed = True
        if self._exchange is not None:
            self._exchange.close()


async def wait(exchange: Exchange) -> Event | None:
    """The next event, None at the end. Whatever else happens, the task's cancellation included, the exchange is
    closed."""
    try:
        while (event := exchange.poll()) is None and not exchange.finished:
            await _readable(exchange)
    except BaseException:
        exchange.close()
        raise
    return event


async def _readable(exchange: Exchange) -> None:
    loop = asyncio.get_running_loop()
    awake: asyncio.Future[None] = loop.create_future()
    descriptors = [int(one.getsockopt(zmq.FD)) for one in exchange.sockets]

    def wake() -> None:
        for descriptor in descriptors:
            loop.remove_reader(descriptor)
        descriptors.clear()
        if not awake.done():
            awake.set_result(None)

    timer = loop.call_later(exchange.wait_s(), wake)
    exchange.on_close = wake
    for descriptor in descriptors:
        loop.add_reader(descriptor, wake)
    try:
        await awake
    finally:
        timer.cancel()
        exchange.on_close = None
        wake()


class AsyncClient:
    """`Client` for asyncio. It belongs to one event loop; tasks may share it, each call and stream has its own
    connection. `aclose` cancels what still runs. Raises what `Client` raises."""

    def __init__(self, socket: str | Path | None = None, *, report: start.Report | None = None) -> None:
        self.socket = paths.socket_path() if socket is None else paths.checked(Path(socket).expanduser().absolute())
        self._report = report
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._running: weakref.WeakSet[Exchange] = weakref.WeakSet()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Calls that other tasks still wait for end with Cancelled."""
        for exchange in list(self._running):
            exchange.close()
        await asyncio.to_thread(close_all, self._context, self._running)

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

    async def models(self) -> list[dict[str, Any]]:
        return await self._call(calls.models())

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
    ) -> dict[str, Any]:  # fmt: skip
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
        while (event := await wait(exchange)) is not None:
            if on_event is not None:
                on_event(event)
        return call.answer(exchange.result())

    async def _open(self, asked: Request, may_start: bool = True) -> Exchange:
        try:
            exchange = open_exchange(self._context, self.socket, asked)
        except Unreachable as problem:
            if not (may_start and may_be_started(problem, self.socket)):
                raise
            with start.starting(self.socket, self._report) as starting:
                while not starting.ready():
                    await asyncio.sleep(start.POLL_S)
            exchange = open_exchange(self._context, self.socket, asked)
        self._running.add(exchange)
        return exchange
