"""From a client's message to who answers it: a worker, for work on a model; one of the verbs, for all else."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgpack

from kvclient.errors import BadRequest, Busy, Internal, KvdError, ProtocolError
from kvclient.fields import INPUT, checked
from kvclient.wire import Message
from kvd.front.logs import logger
from kvd.front.registry import Model
from kvd.front.server import Peer, error
from kvd.front.sessions import Session, cancelled, late
from kvd.front.slot import State
from kvd.front.verbs import VERBS, Call, Services
from kvd.messages import WORK_KINDS

PEEK_MOST = 1024 * 1024
"""bytes of a body that is looked into on the loop's thread"""


class Dispatch:
    """Owned by the loop's thread."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._tasks: set[asyncio.Task[None]] = set()
        self._finding: set[asyncio.Task[None]] = set()
        """requests whose model is looked for"""

    def message(self, peer: Peer, message: Message) -> None:
        sessions = self._services.sessions
        try:
            session = sessions.open(peer, message)
        except BadRequest as problem:
            sessions.server.send(peer, error(message.id, problem))
            return
        try:
            if message.kind in WORK_KINDS:
                self._work(session, message)
            else:
                self._verb(session, message)
        except KvdError as problem:
            sessions.fail(session, problem)

    def _work(self, session: Session, message: Message) -> None:
        """A model that is loaded is not looked for: its disk may hang."""
        services = self._services
        if session.peer.control:
            raise BadRequest(f"{message.kind} belongs on the request socket", verb=message.kind)
        if loaded := self._loaded(message.model or services.config.models.default):
            self._submit(session, message, loaded)
            return
        waiting, limit = len(self._finding), services.config.daemon.max_waiting
        if waiting >= limit and services.registry.silent:
            raise Busy(f"{waiting} requests wait for the disk of the models", waiting=waiting, limit=limit)
        services.fleet.check_room()
        if len(message.packed) <= PEEK_MOST:
            session.limit_s = _limit(message.packed)
        task = self._begin(session, self._find(session, message))
        self._finding.add(task)
        task.add_done_callback(self._finding.discard)
        session.on_cancel = lambda reason: self._give_up(session, task, reason)

    async def _find(self, session: Session, message: Message) -> None:
        services = self._services
        try:
            async with asyncio.timeout(session.limit_s):
                name = await services.registry.resolve(message.model, services.config.models)
                model = self._loaded(name) or await services.registry.model(name)
        except TimeoutError:
            raise late(session.limit_s) from None
        self._submit(session, message, model)

    def _give_up(self, session: Session, task: asyncio.Task[None], reason: str) -> None:
        """The disk may not answer for hours: the request holds neither its bytes nor a place until then."""
        task.cancel()
        self._services.sessions.fail(session, cancelled(reason))

    def _loaded(self, name: str) -> Model | None:
        slots = self._services.fleet.slots
        return next((slot.model for slot in slots if slot.model.name == name and slot.state is State.LOADED), None)

    def _submit(self, session: Session, message: Message, model: Model) -> None:
        session.log.info(message.kind, model=model.name, bytes=len(message.packed))
        if self._services.config.daemon.log_prompts and len(message.packed) <= PEEK_MOST:
            session.log.info("prompt", **_input(message))
        self._services.fleet.submit(session, model)

    def _verb(self, session: Session, message: Message) -> None:
        verb = VERBS.get(message.kind)
        if verb is None:
            raise BadRequest(f"unknown verb {message.kind[:40]!r}", verb=message.kind[:40])
        if (size := len(message.packed)) > PEEK_MOST:
            raise BadRequest(f"{message.kind} takes no {size} bytes", size=size, limit=PEEK_MOST)
        call = Call(session, checked(message.kind, message.body), self._services)
        session.packed = b""
        self._begin(session, verb.run(call))

    def _begin(self, session: Session, work: Coroutine[Any, Any, dict[str, Any] | None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._run(session, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # cancelled before its first step, it would be missed
        return task

    async def _run(self, session: Session, work: Coroutine[Any, Any, dict[str, Any] | None]) -> None:
        """Its result ends the request; None: somebody else will."""
        sessions = self._services.sessions
        try:
            result = await work
        except KvdError as problem:
            sessions.fail(session, problem)
        except Exception as problem:  # noqa: BLE001  a bug in one verb is its client's error, not the daemon's end
            logger.error("verb failed", verb=session.kind, request=session.id, exc_info=problem)
            sessions.fail(session, Internal(f"{session.kind} failed: {type(problem).__name__}"))
        else:
            if result is not None:
                sessions.finish(session, "result", result)


def _input(message: Message) -> dict[str, Any]:
    """What is to be read, for a log whose owner asked for it."""
    return {name: value for name, value in message.body.items() if name in INPUT}


def _limit(packed: bytes) -> float | None:
    """The request's own `timeout` in seconds; other fields are skipped unread."""
    unpacker = msgpack.Unpacker(max_buffer_size=PEEK_MOST)
    unpacker.feed(packed)
    try:
        for _ in range(unpacker.read_map_header()):
            if unpacker.unpack() != "timeout":
                unpacker.skip()
                continue
            value = unpacker.unpack()
            return float(value) if isinstance(value, (int, float)) and value > 0 else None
    except (ValueError, msgpack.exceptions.UnpackException) as problem:
        raise ProtocolError(f"not msgpack: {type(problem).__name__}") from None
    return None
