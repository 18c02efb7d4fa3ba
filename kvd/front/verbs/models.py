"""Verbs about models: which there are, load, unload."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from kvclient.errors import BadRequest
from kvd import kinds
from kvd.front.registry import Seen
from kvd.front.slot import Slot, State
from kvd.front.verbs.base import Body, Call, Services
from kvd.models.aliases import by_model


async def describe(services: Services) -> list[dict[str, Any]]:
    """Every model that is here, loaded or not, and those that run though their folder is gone."""
    found = {seen.name: seen for seen in await services.registry.all()}
    gone = {
        slot.model.name: Seen(slot.model.name, replace(slot.model, facts={}))
        for slot in services.fleet.slots if slot.state is not State.NOT_LOADED
    }  # fmt: skip
    return _rows(services, [seen for _, seen in sorted((gone | found).items())])


def _rows(services: Services, found: Iterable[Seen]) -> list[dict[str, Any]]:
    slots = {slot.model.name: slot for slot in services.fleet.slots}
    aliases = by_model(services.config.models.aliases, services.registry.known)
    return [_row(seen, slots.get(seen.name), aliases.get(seen.name, [])) for seen in found]


def _row(seen: Seen, slot: Slot | None, aliases: list[str]) -> dict[str, Any]:
    """`unread_s`: for so many seconds the disk has not said what of this is still true."""
    about: dict[str, Any] = {"name": seen.name, "state": State.NOT_LOADED.value, "aliases": aliases}
    if (model := seen.model) is not None:
        record = model.record
        about |= {"source": record.source, "fingerprint": record.fingerprint, "pulled_at": record.pulled_at}
        about |= model.facts
    if seen.unread_s:
        about["unread_s"] = round(seen.unread_s, 3)
    return about if slot is None else about | slot.describe()


class Models:
    """What is here, and what of it is loaded; with a name only the model it leads to."""

    name = "models"

    async def run(self, call: Call) -> Body:
        services, asked = call.services, call.body.get("model")
        if asked is None:
            return {"models": await describe(services)}
        name = await services.registry.resolve(asked, services.config.models)
        return {"models": _rows(services, [await services.registry.seen(name)])}


class Load:
    """Load a model, or change its KV precision, its pin or its time to live. Answers when it is ready."""

    name = "load"

    async def run(self, call: Call) -> Body:
        services, body = call.services, call.body
        model = await services.registry.model(await services.registry.resolve(body["model"], services.config.models))
        if (kv := body.get("kv")) is not None:
            try:
                kinds.PRECISION.parse(kv)
            except ValueError as problem:
                raise BadRequest(str(problem), kv=kv) from None
        return await services.fleet.load(model, kv, body.get("pin"), body.get("ttl_s"))


class Unload:
    """Give a model's memory back and forget its pin and the KV precision that was asked for. Requests running on it end
    with an error; its cache on disk stays."""

    name = "unload"

    async def run(self, call: Call) -> Body:
        services, name = call.services, call.body["model"]
        slot = _slot(services, name)
        if slot is None or slot.state is State.NOT_LOADED:  # what runs need not be looked for: its folder may be gone
            name = await services.registry.resolve(name, services.config.models)
            slot = _slot(services, name)
        if slot is None:
            return {"model": name, "unloaded": False}
        was = slot.state
        slot.pinned, slot.kv = False, None
        await services.fleet.unload(slot, "asked")
        return {"model": name, "unloaded": was is not State.NOT_LOADED}


def _slot(services: Services, name: str) -> Slot | None:
    return next((slot for slot in services.fleet.slots if slot.model.name == name), None)
