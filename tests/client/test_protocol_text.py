"""PROTOCOL.md against the code: nothing on the wire goes without a word."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kvclient import core, events, fields, wire
from kvd.worker.params import Sampling

TEXT = (Path(wire.__file__).with_name("PROTOCOL.md")).read_text()


@pytest.mark.parametrize("name", sorted({name for table in fields.VERBS.values() for name in table} | {"verb"}))
def test_every_field_is_described(name: str) -> None:
    assert f"`{name}`" in TEXT or f" {name} " in TEXT or f"`{name} " in TEXT


@pytest.mark.parametrize("verb", [*fields.VERBS, "cache"])
def test_every_verb_is_described_in_its_lane(verb: str) -> None:
    lane = "control" if verb in core.CONTROL_VERBS else "requests"
    row = next(line for line in TEXT.splitlines() if line.startswith(f"| {lane} |"))
    assert verb in row.split("|")[3].strip(" `").split()


@pytest.mark.parametrize("kind", ["queued", "progress", "text", "reasoning", "tool_call", "finish", *wire.TERMINAL])
def test_every_event_is_described(kind: str) -> None:
    assert f"`{kind}`" in TEXT


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(events.Stats) if f.name != "other"])
def test_every_figure_is_described(name: str) -> None:
    assert name in TEXT.split("`stats`: ")[1]


@pytest.mark.parametrize("verb", fields.CACHE_VERBS)
def test_every_verb_of_the_store_is_named(verb: str) -> None:
    assert verb in TEXT.split("- `cache`: `verb` (`")[1].split("`)")[0].split()


def test_the_numbers_are_those_of_the_code() -> None:
    assert f"version {wire.VERSION}\n" in TEXT
    assert f"header {wire.MAX_HEADER:,} bytes; body {wire.MAX_BODY // 2**20} MiB" in TEXT
    assert f"nothing came for {core.SILENCE_S:g} s" in TEXT and f"within another {core.PONG_S:g} s" in TEXT
    assert f"nothing for {core.ORPHAN_S:g} s" in TEXT and f"by itself {core.GRACE_S:g} s after" in TEXT
    assert f"1 to {fields.MAX_CHOICES} answers" in TEXT and f"0 to {fields.MAX_TOP_LOGPROBS}, needs" in TEXT
    assert f"| {Sampling().temperature:g} |" in next(line for line in TEXT.splitlines() if "| `temperature` |" in line)
    assert f"up to {fields.MAX_STOPS} texts" in TEXT and f"{fields.MAX_DEPTH} levels" in TEXT
