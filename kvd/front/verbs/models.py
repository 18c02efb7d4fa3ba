"""Verbs about models: which there are, load, unload."""

from __future__ import annotations

from typing import Any

from kvclient.errors import BadRequest
from kvd import kinds
from kvd.front.registry import Model
from kvd.front.slot import Slot, State
from kvd.front.verbs.base import Body, Call, Services
from kvd.models.facts import facts


def describe(services: Services) -> list[dict[str, Any]]:
    """Every model that is here, loaded or not, and those that run though their folder is gone."""
    slots = {slot.model.name: slot for slot in services.fleet.slots}
    rows = {model.name: _row(model, slots.get(model.name)) for model in services.registry.all()}
    for name, slot in slots.items():
        if name not in rows and slot.state is not State.NOT_LOADED:
            rows[name] = _row(slot.model, slot)
    return [rows[name] for name in sorted(rows)]


def _row(model: Model, slot: Slot | None) -> dict[str, Any]:
    about = {
        "name": model.name, "state": State.NOT_LOADED.value, "source": model.record.source,
        "fingerprint": model.record.fingerprint, "pulled_at": model.record.pulled_at, "notes": list(model.record.notes),
        **facts(model.folder),
    }  # fmt: skip
    return about if slot is None else about | slot.describe()


class Models:
    """What is here, and what of it is loaded."""

    name = "models"

    async def run(self, call: Call) -> Body:
        return {"models": describe(call.services)}


class Load:
    """Load a model, or change its KV precision, its pin or its time to live. Answers when it is ready."""

    name = "load"

    async def run(self, call: Call) -> Body:
        services, body = call.services, call.body
        model = services.registry.resolve(body["model"], services.config.models.default)
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
        model = services.registry.resolve(call.body["model"], services.config.models.default)
        slot = services.fleet.slot(model)
        was = slot.state
        slot.pinned, slot.kv = False, None
        await services.fleet.unload(slot, "asked")
        return {"model": model.name, "unloaded": was is not State.NOT_LOADED}
