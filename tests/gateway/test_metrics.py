"""`/metrics`: text that Prometheus reads, with the daemon's own figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvclient.gateway.metrics import Counters, render
from tests.gateway.conftest import Served
from tests.gateway.fake import STATUS

Serve = Callable[..., Served]


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_daemons_counters_keep_their_names_and_labels() -> None:
    found = samples(render(Counters(), STATUS).decode())
    assert found["kvd_up", ()] == 1
    assert found["kvd_prompt_tokens_total", (("source", "cached_memory"),)] == 20
    assert found["kvd_cache_misses_total", (("reason", "not_stored"),)] == 2
    assert found["kvd_completion_tokens_total", ()] == 3


def test_states_are_gauges_by_model() -> None:
    status: dict[str, Any] = {
        "memory": {"limit": 100, "used": 60, "by_model": {"a b": 60}}, "store": {"bytes": 7}, "requests": [{}, {}],
        "models": [
            {"name": "a", "pool_bytes": 5, "phase": "idle", "spill": {"stored": 3}}, {"name": 'b"\n', "live": 2},
        ],
    }  # fmt: skip
    found = samples(render(Counters(), status).decode())
    assert found["kvd_memory_used", ()] == 60 and found["kvd_store_bytes", ()] == 7
    assert found["kvd_memory_by_model", (("model", "a b"),)] == 60
    assert found["kvd_model_pool_bytes", (("model", "a"),)] == 5
    assert found["kvd_model_spill", (("model", "a"), ("reason", "stored"))] == 3
    assert found["kvd_model_live", (("model", 'b"\n'),)] == 2
    assert found["kvd_live_requests", ()] == 2


def test_the_gateways_own_requests_are_counted_and_unknown_paths_are_one(serve: Serve) -> None:
    served = serve()
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
    for _ in range(2):
        httpx.post(served.url + "/v1/chat/completions", json=body)
    for path in ("/a", "/b"):
        httpx.get(served.url + path)
    reply = httpx.get(served.url + "/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = samples(reply.text)
    assert found["kvd_gateway_requests_total", (("path", "/v1/chat/completions"), ("status", "200"))] == 2
    assert found["kvd_gateway_requests_total", (("path", "other"), ("status", "404"))] == 2
    assert found["kvd_gateway_live_requests", ()] == 0
