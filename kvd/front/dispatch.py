"""From a client's message to who answers it: a worker, for work on a model; one of the verbs, for all else."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack

from kvclient.errors import BadRequest, Internal, KvdError, ProtocolError
from kvclient.fields import INPUT, checked
from kvclient.wire import Message
from kvd.front.logs import logger
from kvd.front.server import Peer, error
from kvd.front.sessions import Session
from kvd.front.slot import State
from kvd.front.verbs import VERBS, Call, Services, Verb
from kvd.messages import WORK_KINDS

PEEK_MOST = 1024 * 1024
"""bytes of a body that is looked into on the loop's thread"""


class Dispatch:
    """Owned by the loop's thread."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._tasks: set[asyncio.Task[None]] = set()

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
        services = self._services
        if session.peer.control:
            raise BadRequest(f"{message.kind} belongs on the request socket", verb=message.kind)
        model = services.registry.resolve(message.model, services.config.models)
        session.log.info(message.kind, model=model.name, bytes=len(message.packed))
        if services.config.daemon.log_prompts and len(message.packed) <= PEEK_MOST:
            session.log.info("prompt", **_input(message))
        if services.fleet.slot(model).state is not State.LOADED and len(message.packed) <= PEEK_MOST:
            session.limit_s = _limit(message.packed)
        services.fleet.submit(session, model)

    def _verb(self, session: Session, message: Message) -> None:
        verb = VERBS.get(message.kind)
        if verb is None:
            raise BadRequest(f"unknown verb {message.kind[:40]!r}", verb=message.kind[:40])
        if (size := len(message.packed)) > PEEK_MOST:
            raise BadRequest(f"{message.kind} takes no {size} bytes", size=size, limit=PEEK_MOST)
        call = Call(session, checked(message.kind, message.body), self._services)
        session.packed = b""
        task = asyncio.get_running_loop().create_task(self._run(call, verb))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, call: Call, verb: Verb) -> None:
        sessions, session = self._services.sessions, call.session
        try:
            result = await verb.run(call)
        except KvdError as problem:
            sessions.fail(session, problem)
        except Exception as problem:  # noqa: BLE001  a bug in one verb is its client's error, not the daemon's end
            logger.error("verb failed", verb=session.kind, request=session.id, exc_info=problem)
            sessions.fail(session, Internal(f"{session.kind} failed: {type(problem).__name__}"))
        else:
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
