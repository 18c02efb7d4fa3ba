"""The `cache` verb: the store's own verbs, run in slices by the thread that owns it, so that workers need not wait. To
clear reaches the memory of loaded models as well."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import TYPE_CHECKING, Any

from kvclient.errors import BadRequest, StoreError
from kvd.front.registry import stored_name
from kvd.front.slot import State
from kvd.front.verbs.base import Body, Call
from kvd.front.workers import Worker

if TYPE_CHECKING:
    from kvd.store.verbs import Steps

SLICE_S = 0.02
"""of the store's time at once"""


class Cache:
    """stats ls verify gc clear rebuild export import pin unpin"""

    name = "cache"

    async def run(self, call: Call) -> Body:
        if isinstance(model := call.body.get("model"), str):
            call = dataclasses.replace(call, body={**call.body, "model": await _stored_name(call, model)})
        if call.body["verb"] == "clear":
            return await _clear(call)
        return await _stored(call)


async def _stored_name(call: Call, model: str) -> str:
    """A store that is not there has no names; whoever asks it says so."""
    try:
        stored = await call.services.store.do(_names)
    except StoreError:
        stored = set()
    return stored_name(model, call.services.config.models, await call.services.registry.names(), stored)


async def _stored(call: Call) -> Body:
    """What the store's own verb says."""
    fields = {name: value for name, value in call.body.items() if name != "verb"}
    store = call.services.store
    work: Steps = await store.do(lambda owner: _steps(owner, call.body["verb"], fields))
    while True:
        answer, done, total = await store.do(lambda _: _slice(work))
        if answer is not None:
            return answer
        call.services.sessions.tell(call.session, "progress", {"done": done, "total": total})


async def _clear(call: Call) -> Body:
    """The disk first, so that nothing comes back from there, then the memory of the models that are loaded then. Blocks
    that requests use stay until the next clear."""
    model = call.body.get("model")
    answer: Body = {"checked": 0, "freed": 0, "counts": {}, "namespaces": []}
    try:
        answer = await _stored(call)
    except BadRequest:
        if all(worker.model != model for worker in _loaded(call)):
            raise
    except StoreError as problem:
        blocks = (await _forgotten(call, model, ()))["memory_blocks"]
        raise StoreError(f"{problem.message}; {blocks} blocks were forgotten in memory", **problem.details) from None
    namespaces = tuple(bytes.fromhex(namespace) for namespace in answer["namespaces"])
    return {**answer, **await _forgotten(call, model, namespaces)}


async def _forgotten(call: Call, model: str | None, namespaces: tuple[bytes, ...]) -> Body:
    """The model of this name, or every one, forgets everything; others, which may share weights with it, these
    namespaces."""
    workers = _loaded(call)
    asked = [worker.clear() for worker in workers if model in (None, worker.model)]
    asked += [worker.clear(namespaces) for worker in workers if namespaces and model not in (None, worker.model)]
    answers = await asyncio.gather(*asked)
    return {
        "memory_blocks": sum(one.blocks for one in answers), "memory_bytes": sum(one.nbytes for one in answers),
        "memory_blocks_in_use": sum(one.in_use for one in answers),
    }  # fmt: skip


def _loaded(call: Call) -> list[Worker]:
    return [s.worker for s in call.services.fleet.slots if s.state is State.LOADED and s.worker is not None]


def _names(owner: Any) -> set[str]:
    from kvd.store.verbs import names

    return names(owner)


def _steps(owner: Any, verb: str, fields: dict[str, Any]) -> Steps:
    from kvd.store.verbs import steps  # late, so that the daemon starts without

    return steps(owner, verb, fields)


def _slice(work: Steps) -> tuple[dict[str, Any] | None, int, int]:
    """(answer, done, total) after some steps; the answer is None until the last."""
    until = time.monotonic() + SLICE_S
    done, total = 0, 0
    try:
        while time.monotonic() < until:
            done, total = next(work)
    except StopIteration as end:
        return end.value, done, total
    return None, done, total
