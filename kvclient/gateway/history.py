"""What the page shows over time: samples of the daemon's counters, and the requests that came through here."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

from kvclient.aio import AsyncClient
from kvclient.errors import KvdError
from kvclient.events import Completion, Stats
from kvclient.gateway.ask import Ask

SAMPLE_S: Final = 5.0
SAMPLES: Final = 720
RECENT: Final = 40
PREFIXES: Final = 30
RATE_ROWS: Final = 64
"""A prefill of fewer rows says little about its rate."""


class History:
    """Owned by the event loop. Keeps counts only, no text of any prompt."""

    def __init__(self, client: AsyncClient, clock: Any = time.time) -> None:
        self._client = client
        self._clock = clock
        self._samples: deque[dict[str, Any]] = deque(maxlen=SAMPLES)
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._seconds_per_token: dict[str, float] = {}
        self._saved_s = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def finished(self, ask: Ask, done: Completion) -> float:
        """Note a request's end. Returns the prefill seconds that reuse saved: its cached tokens at the model's measured
        rate; 0 until a prefill long enough to measure has been seen."""
        stats, model = done.stats, done.model or ask.model
        if stats.computed_tokens >= RATE_ROWS and stats.prefill_s > 0:
            self._seconds_per_token[model] = stats.prefill_s / stats.computed_tokens
        saved = stats.cached_tokens * self._seconds_per_token.get(model, 0.0)
        self._saved_s += saved
        self._recent.append({"t": self._clock(), "model": model, "saved_s": saved, **_counts(stats)})
        return saved

    async def data(self, since: float = 0.0) -> dict[str, Any]:
        """All that the page draws: the daemon's status, samples after `since`, recent requests. `error` when the daemon
        does not answer."""
        status: Mapping[str, Any] | None = None
        error = None
        try:
            status = await self._client.status()
            self._take(status)
        except KvdError as problem:
            error = problem.message
        return {
            "now": self._clock(), "status": status, "error": error, "saved_s": self._saved_s,
            "samples": [sample for sample in self._samples if sample["t"] > since], "recent": list(self._recent),
        }

    async def prefixes(self) -> list[dict[str, Any]]:
        """The largest stored prefixes, each with all that continues it. Empty when the daemon has no store to ask."""
        try:
            found = await self._client.cache("ls")
        except KvdError:
            return []
        return largest_prefixes(found.get("prefixes") or (), PREFIXES)

    async def _run(self) -> None:
        while True:
            with suppress(KvdError):
                self._take(await self._client.status())
            await asyncio.sleep(SAMPLE_S)

    def _take(self, status: Mapping[str, Any]) -> None:
        now = self._clock()
        if self._samples and now - self._samples[-1]["t"] < 0.8 * SAMPLE_S:
            return
        self._samples.append({"t": now, "saved_s": self._saved_s, **prompt_tokens(status)})


def largest_prefixes(tree: Iterable[Mapping[str, Any]], most: int) -> list[dict[str, Any]]:
    """The tops of the store's tree (its nodes in a list, parents first) with the sums over what continues them, largest
    first."""
    tops: list[dict[str, Any]] = []
    for node in tree:
        if not node["depth"]:
            words = node.get("words") or node["preview"]
            tops.append({"preview": words, "model": node["model"], "pinned": bool(node.get("pinned"))})
        for name in ("tokens", "bytes", "hits"):
            tops[-1][name] = tops[-1].get(name, 0) + int(node[name])
    return sorted(tops, key=lambda one: -int(one["bytes"]))[:most]


def prompt_tokens(status: Mapping[str, Any]) -> dict[str, int]:
    """Prompt tokens since the daemon's start by source: "cached_memory", "cached_ssd", "computed"."""
    for metric in status.get("metrics") or ():
        if metric.get("name") == "kvd_prompt_tokens_total":
            return {str(source): int(count) for source, count in metric["values"].items()}
    return {}


def _counts(stats: Stats) -> dict[str, Any]:
    at = stats.first_divergence
    return {
        "prompt": stats.prompt_tokens, "memory": stats.cached_memory_tokens, "ssd": stats.cached_ssd_tokens,
        "computed": stats.computed_tokens, "completion": stats.completion_tokens, "ttft_s": stats.ttft_s,
        "miss_reason": stats.miss_reason, "divergence": at.token if at else None,
    }
