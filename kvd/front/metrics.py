"""Every number the daemon counts, in one registry: `status` carries it, the gateway prints it for Prometheus."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from enum import Enum
from typing import Any


class Count(Enum):
    """Counters as (name, label, help). Each is kept per value of its label; "" where it has none."""

    REQUESTS = ("kvd_requests_total", "kind", "requests accepted, by verb")
    FINISHED = ("kvd_requests_finished_total", "outcome", "requests ended: done, or the error's code")
    PROMPT_TOKENS = ("kvd_prompt_tokens_total", "source", "prompt tokens, by where their KV came from")
    COMPLETION_TOKENS = ("kvd_completion_tokens_total", "", "tokens generated")
    MISSES = ("kvd_cache_misses_total", "reason", "requests whose prompt was not reused to its end, by reason")
    PROTOCOL = ("kvd_protocol_errors_total", "reason", "messages that were not ours")
    CLIENTS_GONE = ("kvd_clients_gone_total", "", "clients found dead")
    SLOW = ("kvd_slow_readers_total", "reason", "clients that did not read")
    GATE = ("kvd_connection_gate_total", "lane", "times a socket was closed to new connections")
    WORKERS = ("kvd_workers_total", "event", "worker processes started, ready, stopped and lost")
    MODELS = ("kvd_models_unloaded_total", "reason", "models unloaded, by reason")
    STORE = ("kvd_store_events_total", "reason", "what the store did, dropped or refused")
    MEMORY = ("kvd_memory_refusals_total", "reason", "loads and growth refused by the ledger, answers cut for it")

    @property
    def metric(self) -> str:
        return self.value[0]


class Metrics:
    """Owned by the loop's thread."""

    def __init__(self) -> None:
        self._counts: dict[Count, dict[str, int]] = {count: defaultdict(int) for count in Count}

    def add(self, count: Count, label: str = "", n: int = 1) -> None:
        self._counts[count][label] += n

    def get(self, count: Count, label: str = "") -> int:
        return self._counts[count].get(label, 0)

    def add_stats(self, stats: Mapping[str, Any]) -> None:
        """What a request's `done` says of its tokens."""
        for source in ("cached_memory", "cached_ssd", "computed"):
            self.add(Count.PROMPT_TOKENS, source, int(stats.get(f"{source}_tokens") or 0))
        self.add(Count.COMPLETION_TOKENS, n=int(stats.get("completion_tokens") or 0))
        if reason := stats.get("miss_reason"):
            self.add(Count.MISSES, str(reason))
        if stats.get("out_of_memory"):
            self.add(Count.MEMORY, "answer")

    def snapshot(self, more: Mapping[Count, Mapping[str, int]]) -> list[dict[str, Any]]:
        """One map per counter that is not empty: name, label, help, values by label. `more` holds what is counted
        elsewhere (by the store's thread)."""
        every = {**self._counts, **more}
        return [
            {"name": c.value[0], "label": c.value[1], "help": c.value[2], "values": dict(values)}
            for c, values in every.items()
            if values
        ]
