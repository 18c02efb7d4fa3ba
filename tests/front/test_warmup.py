"""Prompts of the configuration are prefilled at start; what they say stays out of the log unless it is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.front.support import Daemon, daemon, until


def logged(made: Daemon, event: str) -> list[dict[str, str]]:
    lines = (made.home / "logs" / "kvd.log").read_text().splitlines()
    return [fields for fields in map(json.loads, lines) if fields["event"] == event]


def test_prompts_are_warmed_in_turn_and_a_missing_file_stops_nothing(tmp_path: Path) -> None:
    document = tmp_path / "manual.md"
    document.write_text("The manual.")
    prompts = f"demo={tmp_path / 'none.md'},demo={document},nosuch={document}"
    with daemon(f"warm.prompts={prompts}") as made:
        until(lambda: len(logged(made, "warmed")) + len(logged(made, "not warmed")) == 3, "all three tried")
        assert [line["file"] for line in logged(made, "warmed")] == [str(document)]
        assert [line["model"] for line in logged(made, "not warmed")] == ["demo", "nosuch"]
        assert made.model()["state"] == "loaded"


@pytest.mark.parametrize("allowed", [False, True])
def test_prompt_text_is_logged_only_if_asked_for(allowed: bool) -> None:
    with daemon(f"daemon.log_prompts={str(allowed).lower()}") as made, made.client() as client:
        client.call("generate", {"prompt": "say 1"}, "demo")
        text = (made.home / "logs" / "kvd.log").read_text()
        assert ("say 1" in text) is allowed
