"""The application: routes, and how a request of each API becomes a reply."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvclient.aio import AsyncClient
from kvclient.errors import Busy, KvdError
from kvclient.events import Completion
from kvclient.gateway import metrics, page, volatile
from kvclient.gateway.anthropic import messages
from kvclient.gateway.anthropic.reply import MessageReply
from kvclient.gateway.ask import Ask
from kvclient.gateway.auth import salt_of
from kvclient.gateway.fields import Fields
from kvclient.gateway.gate import Gate, json_body
from kvclient.gateway.history import History
from kvclient.gateway.openai import chat, completions, models, responses
from kvclient.gateway.openai.chat_reply import ChatReply
from kvclient.gateway.openai.completions_reply import CompletionsReply
from kvclient.gateway.openai.responses_reply import ResponsesReply
from kvclient.gateway.problems import not_found, refused
from kvclient.gateway.reply import Reply, send_error
from kvclient.gateway.settings import EVERY_MODEL, Settings
from kvclient.gateway.shape import Shape
from kvclient.gateway.volatile import Rule

Parse = Callable[[Fields], Ask]
MakeShape = Callable[[Ask, str, int], Shape]


class Gateway:
    """The endpoints. One client of the daemon serves all requests."""

    def __init__(self, client: AsyncClient, settings: Settings) -> None:
        self.client = client
        self.settings = settings
        self.counters = metrics.Counters()
        self.history = History(client)
        self._live = 0

    def app(self) -> Starlette:
        routes = [
            Route("/v1/chat/completions", self._generation(chat.parse, ChatReply), methods=["POST"]),
            Route("/v1/completions", self._generation(completions.parse, CompletionsReply), methods=["POST"]),
            Route("/v1/responses", self._generation(responses.parse, ResponsesReply), methods=["POST"]),
            Route("/v1/messages", self._generation(messages.parse, _message_reply), methods=["POST"]),
            Route("/v1/messages/count_tokens", self._count, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._model, methods=["GET"]),
            Route("/v1/embeddings", self._embeddings, methods=["POST"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/healthz", self._health, methods=["GET"]),
            Route("/page/data", self._data, methods=["GET"]),
            Route("/page/prefixes", self._prefixes, methods=["GET"]),
            Route("/page/access", self._access, methods=["GET"]),
            *page.routes(),
        ]
        origins = list(self.settings.guard.origins)
        middleware = [Middleware(Gate, settings=self.settings, counters=self.counters)]
        if origins:
            cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])
            middleware.insert(0, cors)
        handlers: Any = {HTTPException: _http_problem}
        return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async with self.client, self.history:
            yield

    def _generation(self, parse: Parse, shape: MakeShape) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Any:
            fields = await json_body(request, self.settings.max_body)
            ask = await self._prepared(parse(fields), fields, request.state.key)
            id: str = request.state.id
            created = int(time.time())
            return self._counted(Reply(self.client, ask, lambda named: shape(named, id, created), id, self._done))

        return endpoint

    async def _prepared(self, ask: Ask, fields: Fields, key: str | None) -> Ask:
        """Salt of the API key, rules for volatile text, and what the reply says about them."""
        rules = await self._rules(ask.model)
        notes: dict[str, Any] = {}
        bodies = []
        for body in ask.bodies:
            changed = dict(body)
            if key is not None:
                changed["salt"] = salt_of(f"{key}\0{body['salt']}" if "salt" in body else key)
            if rules and "messages" in body:
                steadied = volatile.steady(body["messages"], rules)
                changed["messages"] = steadied.messages
                notes["volatile"] = [
                    {"rule": one.rule, "action": one.action, "lines": one.lines} for one in steadied.applied
                ]
            bodies.append(changed)
        if ignored := fields.ignored():
            notes["ignored"] = ignored
        return replace(ask, bodies=bodies, notes={**ask.notes, **notes})

    async def _rules(self, name: str) -> Sequence[Rule]:
        """Those of the name that was asked for, else of the model that it leads to, as an alias or "" does. The daemon
        is asked only where rules name models."""
        named = self.settings.volatile
        if name not in named and named.keys() - {EVERY_MODEL}:
            (model,) = await self.client.models(name)
            name = str(model["name"])
        return self.settings.rules(name)

    def _counted(self, reply: Reply) -> Callable[[Scope, Receive, Send], Any]:
        """`reply` as an ASGI application that counts as live while it runs. Raises Busy when too many do."""
        limit = self.settings.max_requests
        if self._live >= limit:
            raise Busy(f"{limit} requests are running here, which is the limit", waiting=self._live, limit=limit)

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            self._live += 1
            self.counters.live.set(self._live)
            try:
                await reply(scope, receive, send)
            finally:
                self._live -= 1
                self.counters.live.set(self._live)

        return counted

    def _done(self, ask: Ask, done: Completion) -> None:
        self.counters.saved(self.history.finished(ask, done))

    async def _count(self, request: Request) -> Response:
        fields = await json_body(request, self.settings.max_body)
        body = messages.prompt_of(fields)
        body.pop("response_format", None)
        ask = await self._prepared(Ask(fields.text("model"), [body]), fields, None)
        return JSONResponse({"input_tokens": await self.client.count(ask.model or None, **ask.bodies[0])})

    async def _models(self, request: Request) -> Response:
        found = models.under_each_name(await self.client.models())
        anthropic = "anthropic-version" in request.headers
        return JSONResponse(models.anthropic_list(found) if anthropic else models.openai_list(found))

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        (model,) = await self.client.models(name)
        found = {**model, "name": name or model["name"]}
        anthropic = "anthropic-version" in request.headers
        return JSONResponse(models.anthropic_model(found) if anthropic else models.openai_model(found))

    async def _embeddings(self, request: Request) -> Response:
        raise refused(404, "not_supported", "the daemon serves language models only; it computes no embeddings")

    async def _metrics(self, request: Request) -> Response:
        try:
            status = await self.client.status()
        except KvdError:
            status = None
        return Response(metrics.render(self.counters, status), media_type=metrics.CONTENT_TYPE)

    async def _health(self, request: Request) -> Response:
        try:
            seconds = await self.client.ping()
        except KvdError as problem:
            return JSONResponse({"status": "unreachable", "message": problem.message}, 503)
        return JSONResponse({"status": "ok", "ping_ms": round(seconds * 1000, 2)})

    async def _data(self, request: Request) -> Response:
        try:
            since = float(request.query_params.get("since", "0"))
        except ValueError:
            raise refused(400, "bad_request", "since must be a number of seconds", field="since") from None
        return JSONResponse(await self.history.data(since))

    async def _prefixes(self, request: Request) -> Response:
        return JSONResponse({"prefixes": await self.history.prefixes()})

    async def _access(self, request: Request) -> Response:
        return JSONResponse({"needs_key": bool(self.settings.guard.keys)})


def _message_reply(ask: Ask, id: str, created: int) -> Shape:
    return MessageReply(ask, id)


def build(client: AsyncClient, settings: Settings) -> Starlette:
    return Gateway(client, settings).app()


async def _http_problem(request: Request, problem: HTTPException) -> Any:
    """Starlette's own refusals (no such path, wrong method), in the API's shape."""
    found = not_found(request.url.path)
    if problem.status_code == 405:
        found = refused(405, "method_not_allowed", f"{request.method} is not for {request.url.path}")

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        await send_error(found, scope, send)

    return respond
