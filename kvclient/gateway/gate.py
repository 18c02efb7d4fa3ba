"""What every HTTP request passes first: an id, the guard's rules, size limits, counting."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvclient import wire
from kvclient.errors import Internal, KvdError
from kvclient.gateway import page
from kvclient.gateway.fields import Fields, parse_json
from kvclient.gateway.metrics import Counters
from kvclient.gateway.problems import refused
from kvclient.gateway.reply import send_error
from kvclient.gateway.settings import Settings

OPEN: Final = frozenset({"/", "/health", "/healthz", "/page/access", *page.FILES})
"""Paths that hold no data and need no key: the page asks for one before it asks for data."""
BODY_S: Final = 60.0
"""How long a request's body may take to arrive."""


class Gate:
    """ASGI middleware. Sets `state["id"]` and `state["key"]` (the API key, None where none is needed)."""

    def __init__(self, app: ASGIApp, settings: Settings, counters: Counters) -> None:
        self._app = app
        self._settings = settings
        self._counters = counters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        id = wire.new_id()
        state = scope.setdefault("state", {})
        state["id"] = id
        path: str = scope["path"]
        opened = False

        async def marked(message: Message) -> None:
            nonlocal opened
            if message["type"] == "http.response.start":
                opened = True
                self._counters.answered(path, message["status"])
                message["headers"] = [
                    *message.get("headers", ()), (b"x-request-id", id.encode()), (b"request-id", id.encode())
                ]
            await send(message)

        try:
            state["key"] = self._admit(scope, path)
            await self._app(scope, receive, marked)
        except KvdError as problem:
            if opened:
                raise
            await send_error(problem, scope, marked)
        except Exception as fault:
            if not opened:
                told = Internal(f"a fault of the gateway, see its log: {type(fault).__name__}")
                await send_error(told, scope, marked)
            raise  # the server logs it

    def _admit(self, scope: Scope, path: str) -> str | None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        guard = self._settings.guard
        if (problem := guard.check_origin(headers)) is not None:
            raise problem
        if path in OPEN:
            return None
        return guard.key_of(headers)


async def json_body(request: Request, limit: int) -> Fields:
    """The body, one JSON object. Raises Refused (415, 413, 408) and BadRequest."""
    if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
        raise refused(415, "unsupported_encoding", f"bodies in the encoding {encoding!r} are not read: send plain JSON")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(int(declared), limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise _too_large(size, limit)
                parts.append(part)
    except TimeoutError:
        raise refused(408, "request_timeout", f"the body did not arrive within {BODY_S:g} s") from None
    except ClientDisconnect:
        raise refused(400, "disconnected", "the client went away before its request was read") from None
    return parse_json(b"".join(parts))


def _too_large(size: int, limit: int) -> KvdError:
    return refused(413, "request_too_large", f"the request has {size} bytes or more, the limit is {limit}", limit=limit)
