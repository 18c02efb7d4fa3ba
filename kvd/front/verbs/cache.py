"""The `cache` verb: the store's own verbs, run in slices by the thread that owns it, so that workers need not wait."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvd.front.verbs.base import Body, Call

if TYPE_CHECKING:
    from kvd.store.verbs import Steps

SLICE_S = 0.02
"""of the store's time at once"""


class Cache:
    """stats ls verify gc clear rebuild export import pin unpin"""

    name = "cache"

    async def run(self, call: Call) -> Body:
        fields = {name: value for name, value in call.body.items() if name != "verb"}
        store = call.services.store
        work: Steps = await store.do(lambda owner: _steps(owner, call.body["verb"], fields))
        while True:
            answer, done, total = await store.do(lambda _: _slice(work))
            if answer is not None:
                return answer
            call.services.sessions.tell(call.session, "progress", {"done": done, "total": total})


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
