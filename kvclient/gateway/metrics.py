"""Prometheus text: the daemon's counters and states as `status` gives them, and what the gateway itself counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

KNOWN_PATHS: Final = frozenset({
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/models", "/v1/embeddings", "/metrics", "/health", "/healthz", "/", "/page/data",
})  # fmt: skip
Gauges = dict[str, GaugeMetricFamily]
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Counters:
    """The gateway's own figures, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "kvd_gateway_requests", "HTTP requests answered", ["path", "status"], registry=self.registry
        )
        self.live = Gauge("kvd_gateway_live_requests", "generations in progress", registry=self.registry)
        self._saved = Counter(
            "kvd_gateway_saved_seconds", "prefill time that reuse saved, at the model's rate", registry=self.registry
        )

    def answered(self, path: str, status: int) -> None:
        """Unknown paths are counted as one, so that a scanner cannot grow the registry."""
        self._requests.labels(path if path in KNOWN_PATHS else "other", str(status)).inc()

    def saved(self, seconds: float) -> None:
        self._saved.inc(max(0.0, seconds))


def render(counters: Counters, status: Mapping[str, Any] | None) -> bytes:
    """`status` None: the daemon did not answer; only `kvd_up` says so."""
    registry = CollectorRegistry()
    registry.register(_Daemon(status))
    return generate_latest(registry) + generate_latest(counters.registry)


class _Daemon(Collector):
    def __init__(self, status: Mapping[str, Any] | None) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("kvd_up", "1 if the daemon answers", value=0.0 if self._status is None else 1.0)
        if self._status is None:
            return
        yield from _counted(self._status.get("metrics") or ())
        yield from _states(self._status)


def _counted(metrics: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    """Counters of the daemon's registry: {name, label, help, values by label}."""
    for metric in metrics:
        label = metric.get("label") or ""
        labels = [label] if label else None
        family = CounterMetricFamily(str(metric["name"]), str(metric.get("help", "")), labels=labels)
        for value_label, value in (metric.get("values") or {}).items():
            family.add_metric([str(value_label)] if label else [], float(value))
        yield family


def _states(status: Mapping[str, Any]) -> Iterator[Metric]:
    """Numbers of `status` that go up and down: `memory`, `store`, `clients` and each model's, named after their keys. A
    map among them becomes one metric with a label."""
    gauges: Gauges = {}
    for section in ("memory", "store", "clients"):
        _gather(gauges, f"kvd_{section}", status.get(section) or {}, {})
    for model in status.get("models") or ():
        _gather(gauges, "kvd_model", model, {"model": str(model.get("name", ""))})
    yield from gauges.values()
    live = status.get("requests") or ()
    yield GaugeMetricFamily("kvd_live_requests", "requests waiting or running", value=len(live))


def _gather(gauges: Gauges, prefix: str, table: Mapping[str, Any], labels: dict[str, str]) -> None:
    for key, value in table.items():
        name = f"{prefix}_{key}"
        if isinstance(value, Mapping):
            label = "model" if key in ("by_model", "models") else "reason"
            for part, number in value.items():
                _add(gauges, name, number, {**labels, label: str(part)})
        else:
            _add(gauges, name, value, labels)


def _add(gauges: Gauges, name: str, value: Any, labels: dict[str, str]) -> None:
    if not isinstance(value, int | float):
        return
    if name not in gauges:
        gauges[name] = GaugeMetricFamily(name, f"status: {name[4:].replace('_', ' ')}", labels=list(labels))
    gauges[name].add_metric(list(labels.values()), float(value))
