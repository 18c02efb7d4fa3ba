"""Verbs about models: which there are, load, unload."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvclient.errors import BadRequest
from kvd import kinds
from kvd.front.registry import Model
from kvd.front.slot import Slot, State
from kvd.front.verbs.base import Body, Call, Services
from kvd.models.facts import facts


def describe(services: Services) -> list[dict[str, Any]]:
    """Every model that is here, loaded or not, and those that run though their folder is gone."""
    found = {model.name: model for model in services.registry.all()}
    gone = {s.model.name: s.model for s in services.fleet.slots if s.state is not State.NOT_LOADED}
    return _rows(services, [model for _, model in sorted((gone | found).items())])


def _rows(services: Services, models: Iterable[Model]) -> list[dict[str, Any]]:
    slots = {slot.model.name: slot for slot in services.fleet.slots}
    aliases = services.registry.aliases(services.config.models)
    return [_row(model, slots.get(model.name), aliases.get(model.name, [])) for model in models]


def _row(model: Model, slot: Slot | None, aliases: list[str]) -> dict[str, Any]:
    about = {
        "name": model.name, "state": State.NOT_LOADED.value, "source": model.record.source,
        "fingerprint": model.record.fingerprint, "pulled_at": model.record.pulled_at, "notes": list(model.record.notes),
        "aliases": aliases, **facts(model.folder),
    }  # fmt: skip
    return about if slot is None else about | slot.describe()


class Models:
    """What is here, and what of it is loaded; with a name only the model it leads to."""

    name = "models"

    async def run(self, call: Call) -> Body:
        services, name = call.services, call.body.get("model")
        if name is None:
            return {"models": describe(services)}
        return {"models": _rows(services, [services.registry.resolve(name, services.config.models)])}


class Load:
    """Load a model, or change its KV precision, its pin or its time to live. Answers when it is ready."""

    name = "load"

    async def run(self, call: Call) -> Body:
        services, body = call.services, call.body
        model = services.registry.resolve(body["model"], services.config.models)
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
        services = call.services
        model = services.registry.resolve(call.body["model"], services.config.models)
        slot = services.fleet.slot(model)
        was = slot.state
        slot.pinned, slot.kv = False, None
        await services.fleet.unload(slot, "asked")
        return {"model": model.name, "unloaded": was is not State.NOT_LOADED}
