"""The `cache` verb: the store's own verbs, run by the thread that owns it."""

from __future__ import annotations

from kvclient.errors import BadRequest
from kvd.front.verbs.base import Body, Call


class Cache:
    """stats ls verify gc clear rebuild export import pin unpin"""

    name = "cache"

    async def run(self, call: Call) -> Body:
        verb = call.body["verb"]
        if verb == "stats":
            stats: Body = await call.services.store.do(lambda store: store.stats())
            return stats
        raise BadRequest(f"cache {verb} is not known", verb=verb)
