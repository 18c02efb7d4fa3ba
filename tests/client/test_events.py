"""Every kind of event, and what a malformed one becomes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvclient.errors import ProtocolError
from kvclient.events import Divergence, Event, Progress, Stats, TokenLogprob, ToolCall, event

STATS: dict[str, Any] = {
    "prompt_tokens": 10, "cached_tokens": 6, "cached_memory_tokens": 4, "cached_ssd_tokens": 2, "computed_tokens": 4,
    "completion_tokens": 3, "stored_tokens": 12, "queue_s": 0.1, "prefill_s": 0.2, "ttft_s": 0.3,
    "decode_tokens_per_s": 9.5, "kv_bytes": 1000, "first_divergence": {"token": 6, "text": "a", "stored_text": "b"},
    "miss_reason": "diverged", "peak_memory_bytes": 2000, "recomputed_tokens": 0, "kv_precision": "native",
    "load_s": 1.5, "out_of_memory": {"needed": 4096, "available": 0, "what": "kv pool"},
}  # fmt: skip
TOP = {"id": 8, "token": "x", "logprob": -2.0}
KINDS: list[tuple[str, dict[str, Any], Event]] = [
    ("queued", {"position": 2, "model": "m"}, Event("queued", "r", position=2, model="m")),
    ("queued", {"position": 2}, Event("queued", "r", position=2)),  # of a daemon that does not say it
    ("progress", {"done": 5, "total": 9, "cached": 4, "model": "m"},
     Event("progress", "r", progress=Progress(5, 9, 4), model="m")),
    ("text", {"text": "hi", "index": 1}, Event("text", "r", 1, "hi")),
    ("text", {"text": "hi", "index": 0, "logprobs": [{"id": 7, "token": "hi", "logprob": -0.5, "top": [TOP]}]},
     Event("text", "r", 0, "hi", (TokenLogprob(7, "hi", -0.5, (TokenLogprob(8, "x", -2.0),)),))),
    ("reasoning", {"text": "hm", "index": 0}, Event("reasoning", "r", 0, "hm")),
    ("tool_call", {"index": 0, "call": {"id": "c1", "name": "look", "arguments": "{}"}},
     Event("tool_call", "r", 0, tool_call=ToolCall("c1", "look", "{}"))),
    ("finish", {"index": 1, "finish_reason": "stop"}, Event("finish", "r", 1, finish_reason="stop")),
    ("finish", {"index": 0, "finish_reason": "stop", "stop_sequence": "END"},
     Event("finish", "r", 0, finish_reason="stop", stop_sequence="END")),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "body", "expected"), KINDS)
def test_each_kind_becomes_its_event(kind: str, body: dict[str, Any], expected: Event) -> None:
    assert event(kind, "r", body) == expected


@pytest.mark.parametrize(("kind", "body"), [
    ("queued", {}), ("queued", {"position": "first"}), ("progress", {"done": 1}), ("text", {}),
    ("text", {"text": "x", "index": "first"}), ("text", {"text": "x", "logprobs": [{}]}),
    ("text", {"text": "x", "logprobs": 5}),
    ("tool_call", {"index": 0}), ("tool_call", {"call": {"id": "c"}}), ("finish", {"index": 0}),
])  # fmt: skip
def test_a_malformed_event_is_a_protocol_error_that_names_its_kind(kind: str, body: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match=f"malformed {kind} event"):
        event(kind, "r", body)


def test_a_kind_of_a_newer_daemon_is_skipped() -> None:
    assert event("hologram", "r", {"depth": 3}) is None


def test_stats_hold_every_field_of_the_contract() -> None:
    stats = Stats.from_wire(STATS)
    assert stats.to_wire() == STATS
    assert stats.first_divergence == Divergence(6, "a", "b")
    assert {f.name for f in dataclasses.fields(Stats)} == {*STATS, "other"}


def test_stats_of_another_version_lose_nothing_and_lack_nothing() -> None:
    stats = Stats.from_wire({"prompt_tokens": 1, "saved_joules": 5, "miss_reason": None})
    assert (stats.prompt_tokens, stats.miss_reason, stats.first_divergence) == (1, None, None)
    assert stats.other == {"saved_joules": 5} and stats.to_wire()["saved_joules"] == 5


@pytest.mark.parametrize("made", [Stats(), Progress(0, 1), Event("text", "r"), TokenLogprob(1, "a", 0.0)])
def test_values_are_frozen_and_slotted(made: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, dataclasses.fields(made)[0].name, 1)
    assert not hasattr(made, "__dict__")
