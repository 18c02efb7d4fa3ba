"""One generation as an ASGI response: pumps the daemon's events into a shape, and ends the request when the client
has gone."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from starlette.types import Message, Receive, Scope, Send

from kvclient.aio import AsyncClient
from kvclient.errors import KvdError, Unreachable
from kvclient.events import Completion, Event
from kvclient.gateway.ask import Ask
from kvclient.gateway.problems import error_headers, error_json, status_of
from kvclient.gateway.shape import Shape
from kvclient.gateway.source import WAITING, events_of

HOLD_S: Final = 1.5
"""While a request only waits, the head of its stream is held back this long: so long an error has its HTTP status."""
KEEP_ALIVE_S: Final = 1.0
"""Least time between two keep-alives."""
Headers = list[tuple[bytes, bytes]]
OnDone = Callable[[Ask, Completion], None]
MakeShape = Callable[[Ask], Shape]


class Reply:
    """Streams if the Ask says so. A client that goes away cancels the request, unless its text has ended already:
    then it runs on to its end, so that the answer is stored."""

    def __init__(self, client: AsyncClient, ask: Ask, make_shape: MakeShape, id: str, on_done: OnDone) -> None:
        self._client = client
        self._ask = ask
        self._make_shape = make_shape
        self._shape: Shape
        self._met = False
        """the first event came, so that there is a shape"""
        self._id = id
        self._on_done = on_done
        self._running = ask.n * len(ask.bodies)
        """choices whose text has not ended"""
        self._started = False
        self._closed = False
        self._wrote = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._run(scope, send))
        gone = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done() or self._running == 0:
                await work
        except asyncio.CancelledError:  # by the server, which is about to exit: nobody above waits for it
            work.cancel()
            await asyncio.wait({work})
            await self._fail(Unreachable("the gateway is stopping"), scope, send)
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _run(self, scope: Scope, send: Send) -> None:
        try:
            async with aclosing(events_of(self._client, self._ask, self._id)) as events:
                if self._ask.stream:
                    await self._stream(events, send)
                else:
                    await self._whole(events, send)
        except KvdError as problem:
            await self._fail(problem, scope, send)

    def _meet(self, event: Event) -> None:
        """The first event says which model answers: all of the reply repeats it, where the client named none."""
        if not self._met:
            said = event.model if event.done is None else event.done.model
            self._ask = replace(self._ask, model=self._ask.model or said)
            self._shape = self._make_shape(self._ask)
            self._met = True

    async def _stream(self, events: AsyncGenerator[Event], send: Send) -> None:
        began = time.monotonic()
        async for event in events:
            self._meet(event)
            if event.kind in WAITING:
                now = time.monotonic()
                held = event.kind == "queued" and not self._started and now - began < HOLD_S
                if held or (self._started and now - self._wrote < KEEP_ALIVE_S):
                    continue
                data = self._shape.keep_alive(event)
                self._wrote = now
            else:
                data = self._take(event)
            if not self._started:
                await self._open(send, 200, b"text/event-stream; charset=utf-8", [(b"x-accel-buffering", b"no")])
                data = self._shape.begin(event) + data
            if data and not self._closed:
                self._closed = self._shape.complete
                await send({"type": "http.response.body", "body": data, "more_body": not self._closed})
        if not self._closed:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _take(self, event: Event) -> bytes:
        if event.done is not None:
            self._running = 0
            self._on_done(self._ask, event.done)
            return self._shape.end(event.done)
        if event.kind == "finish":
            self._running -= 1
        return self._shape.event(event)

    async def _whole(self, events: AsyncGenerator[Event], send: Send) -> None:
        async for event in events:
            self._meet(event)
            if event.kind == "finish":
                self._running -= 1
            if event.done is not None:
                self._on_done(self._ask, event.done)
                body = json.dumps(self._shape.whole(event.done), ensure_ascii=False).encode()
                await self._open(send, 200, b"application/json", [(b"content-length", str(len(body)).encode())])
                self._closed = True
                await send({"type": "http.response.body", "body": body})

    async def _fail(self, problem: KvdError, scope: Scope, send: Send) -> None:
        if self._closed:
            return
        if self._started:
            await send({"type": "http.response.body", "body": self._shape.fail(problem), "more_body": False})
            return
        await send_error(problem, scope, send)

    async def _open(self, send: Send, status: int, kind: bytes, more: Headers) -> None:
        self._started = True
        self._wrote = time.monotonic()
        headers = [(b"content-type", kind), (b"cache-control", b"no-cache"), *more]
        await send({"type": "http.response.start", "status": status, "headers": headers})


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone."""
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()


async def send_error(problem: KvdError, scope: Scope, send: Send) -> None:
    await send_body(send, status_of(problem), error_json(problem, scope), error_headers(problem))


async def send_body(send: Send, status: int, body: bytes, more: Headers | None = None) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *(more or [])]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
