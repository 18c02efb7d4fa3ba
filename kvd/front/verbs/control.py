"""Verbs of the control lane, and reload."""

from __future__ import annotations

import os
import time
from typing import Any

from kvclient import __version__, wire
from kvclient.errors import BadRequest
from kvd.front.metrics import Count
from kvd.front.sessions import Session
from kvd.front.verbs.base import Body, Call
from kvd.front.verbs.models import describe


class Ping:
    """Answers at once."""

    name = "ping"

    async def run(self, call: Call) -> Body:
        return {"pid": os.getpid(), "version": __version__, "protocol": wire.VERSION}


class Cancel:
    """Stop a request of any client, by id. `cancelled` is false when it is not running (any more)."""

    name = "cancel"

    async def run(self, call: Call) -> Body:
        session = call.services.sessions.get(call.body["id"])
        if session is None:
            return {"id": call.body["id"], "cancelled": False}
        if session.on_cancel is None:
            raise BadRequest(f"{session.kind} cannot be cancelled", id=session.id)
        session.cancel("asked")
        return {"id": session.id, "cancelled": True}


class Shutdown:
    """Stop the daemon; running requests have `drain_s` seconds (default: daemon.drain) to finish."""

    name = "shutdown"

    async def run(self, call: Call) -> Body:
        call.services.shutdown(call.body.get("drain_s"))
        return {"pid": os.getpid()}


class Reload:
    """Read the configuration again; what can change live does."""

    name = "reload"

    async def run(self, call: Call) -> Body:
        applied, restart = call.services.reload()
        return {"applied": applied, "restart": restart}


class Status:
    """Everything the daemon knows of itself; the same numbers as its metrics."""

    name = "status"

    async def run(self, call: Call) -> Body:
        services = call.services
        models = await describe(services)
        held = {slot.model.name: services.ledger.held(slot.model.name).total for slot in services.fleet.slots}
        return {
            "pid": os.getpid(), "version": __version__, "protocol": wire.VERSION,
            "home": str(services.config.home), "uptime_s": round(time.time() - services.born, 3),
            "models": models,
            "requests": [_request(session) for session in services.sessions if session is not call.session],
            "memory": {"budget_bytes": services.ledger.budget, "used_bytes": services.ledger.used,
                       "by_model": {name: size for name, size in held.items() if size}},
            "clients": {"backlog_bytes": services.sessions.server.backlog, "gated": services.sessions.server.gated},
            "store": services.store.status(),
            "metrics": services.metrics.snapshot({Count.STORE: services.store.counts()}),
        }  # fmt: skip


def _request(session: Session) -> dict[str, Any]:
    kind, body = session.repeat
    return {
        "id": session.id, "kind": session.kind, "model": session.model, "stage": session.stage.value,
        "age_s": round(time.monotonic() - session.born, 3), kind: body,
    }  # fmt: skip
