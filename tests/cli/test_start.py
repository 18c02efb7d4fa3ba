"""`kvd start`: the daemon in the background, with a worker that only pretends."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvclient import Client, start
from kvd.cli import main as cli
from kvd.home import Home, holder
from tests.front.support import until

DAEMON = """
import sys
from kvd.cli.main import parser_of
from kvd.cli.settings import config_of
from kvd.front.app import Parts, serve
from tests.front.serve import FAKE
serve(config_of(parser_of("serve").parse_args(sys.argv[1:])), Parts(command=(sys.executable, str(FAKE))))
"""
Shown = pytest.CaptureFixture[str]


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvd", dir="/tmp") as folder:
        monkeypatch.setenv("KVD_HOME", folder)
        monkeypatch.delenv("KVD_SOCKET", raising=False)
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        monkeypatch.setattr(start, "command", lambda: [sys.executable, "-c", DAEMON])
        yield Path(folder)
        cli.main(["stop", "--now"])


def test_it_answers_when_start_returns_and_a_second_start_says_that_it_runs(home: Path, capsys: Shown) -> None:
    assert cli.main(["start"]) == 0
    said = capsys.readouterr()
    assert f"is ready in {home}" in said.out and 'kv "hello"' in said.out and said.err == ""
    assert cli.main(["status"]) == 0
    capsys.readouterr()
    assert cli.main(["start", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["started"], again["pid"]) == (False, holder(Home(home)))
    assert cli.main(["start", "--memory-limit", "1GiB"]) == 0
    said = capsys.readouterr()
    assert f"runs already in {home}, pid {again['pid']}" in said.out
    assert "the flags change nothing" in said.err


def test_the_flags_of_serve_reach_it_and_paths_are_of_here(
    home: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "my.toml").write_text('[store]\nlimit = "0"\n')
    monkeypatch.chdir(tmp_path)
    assert cli.main(["start", "--config", "my.toml", "--memory-limit", "1 GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["started"], found["budget_bytes"], found["home"]) == (True, 2**30, str(home))
    with Client() as client:
        until(lambda: client.status()["store"].get("off"), "my.toml turned the store off")


def test_a_daemon_that_does_not_start_is_one_line_with_its_last_words(
    home: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "LOSER_S", 0.1)
    monkeypatch.setattr(start, "command", lambda: ["sh", "-c", "echo the disk is full >&2; exit 1"])
    assert cli.main(["start"]) == 69
    assert capsys.readouterr().err == "kvd: the daemon did not start: the disk is full\n"
    assert cli.main(["start", "--memory-limit", "much"]) == 65
