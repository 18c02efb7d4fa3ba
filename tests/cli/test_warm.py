"""`kvd warm` says whether it kept what it was asked to keep."""

from __future__ import annotations

import json

import pytest

from kvclient.events import Stats
from kvd.cli import main as cli
from kvd.cli import warm


@pytest.mark.parametrize(
    ("words", "stored", "code"),
    [(["--pin"], 256, 70), (["--ttl", "7d", "--json"], 0, 70), (["--pin"], 518, 0), ([], 256, 0)],
)
def test_a_pin_of_less_than_was_asked_for_fails_with_both_numbers(
    words: list[str], stored: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stats = Stats(prompt_tokens=518, computed_tokens=518, stored_tokens=stored)
    monkeypatch.setattr(warm, "_warmed", lambda args, body: stats)
    assert cli.main(["warm", "demo", "-s", "Be brief.", *words]) == code
    shown = capsys.readouterr()
    said = f"kvd: only {stored} of 518 tokens are stored and pinned; `kvd cache stats` says why"
    assert shown.err.startswith(said) if code else not shown.err
    assert json.loads(shown.out)["stats"]["stored_tokens"] == stored if "--json" in words else "518 tokens" in shown.out
