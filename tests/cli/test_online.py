"""Verbs against a running daemon (with a worker that only pretends)."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvclient import Client, bar
from kvclient.client import OnEvent
from kvclient.events import Event, Progress, Stats
from kvd.cli import main as cli
from kvd.cli import stop
from kvd.front.app import LINGER_MS, STORE_CLOSE_S
from kvd.front.workers import STOP_GRACE_S
from kvd.home import Home, holder
from tests.front.support import Daemon, until
from tests.tiny import tiny_model

Shown = pytest.CaptureFixture[str]


def test_load_shows_in_status_top_and_models_until_unload(running: Daemon, capsys: Shown) -> None:
    assert cli.main(["load", "demo", "--pin", "--ttl", "30m"]) == 0
    assert "demo is loaded" in capsys.readouterr().out
    piped = ["top", "--every", "10ms"]
    for words in (["status"], ["models"], [*piped, "--once"], piped):
        assert cli.main(words) == 0
        shown = capsys.readouterr().out
        assert "loaded" in shown and "not loaded" in shown, words
    assert cli.main(["models", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert (rows["demo"]["state"], rows["demo"]["pinned"], rows["demo"]["ttl_s"]) == ("loaded", True, 1800.0)
    assert cli.main(["unload", "demo"]) == 0
    assert capsys.readouterr().out.endswith("demo unloaded\n")
    assert cli.main(["unload", "demo"]) == 0
    assert capsys.readouterr().out == "demo was not loaded\n"
    assert running.model()["state"] == "not loaded"


def test_load_and_unload_say_which_model_an_alias_meant(running: Daemon, capsys: Shown) -> None:
    (running.home / "kvd.toml").write_text('[models]\naliases = {"claude-*" = "demo"}\n')
    assert cli.main(["config", "reload"]) == 0
    capsys.readouterr()
    assert cli.main(["load", "claude-x"]) == 0
    assert capsys.readouterr().out.startswith("demo is loaded")
    assert cli.main(["load", "claude-x", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "demo"
    assert cli.main(["unload", "claude-y"]) == 0
    assert capsys.readouterr().out == "demo unloaded\n"


def test_a_load_shows_that_it_goes_on_where_someone_looks(
    running: Daemon, capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["load", "demo"]) == 0
    assert not capsys.readouterr().err
    assert cli.main(["unload", "demo"]) == 0
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert cli.main(["load", "demo"]) == 0
    assert "loading demo" in capsys.readouterr().err
    assert cli.main(["load", "[/]"]) == 65
    assert "no model named '[/]'" in capsys.readouterr().err


def test_a_live_request_is_shown_with_its_id(running: Daemon, capsys: Shown) -> None:
    with running.client() as client:
        id = client.ask("generate", {"prompt": "hold"}, "demo")
        until(lambda: running.status()["requests"], "the request runs")
        assert cli.main(["status"]) == 0
        assert id[:12] in capsys.readouterr().out


def test_warm_sends_what_kv_would_and_reports(running: Daemon, capsys: Shown, tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text("A manual.")
    assert cli.main(["warm", "demo", str(document), "--ttl", "7d"]) == 0
    assert "tokens" in capsys.readouterr().out
    assert running.count("kvd_requests_total", "warm") == 1


def test_a_warm_shows_the_bar_of_kv_and_takes_it_away(
    capsys: Shown, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def warm(self: Client, model: str, *, on_event: OnEvent, **fields: Any) -> Stats:
        on_event(Event("queued", "1", position=2))
        on_event(Event("progress", "1", progress=Progress(256, 1024, 0)))
        return Stats(prompt_tokens=1024)

    drawn: list[str] = []
    monkeypatch.setattr(Client, "warm", warm)
    monkeypatch.setattr(bar, "PATIENCE_S", 0.0)
    monkeypatch.setattr(bar, "EVERY_S", 0.0)
    monkeypatch.setattr(bar.Bar, "for_stderr", lambda: bar.Bar(drawn.append))
    (tmp_path / "a.md").write_text("A manual.")
    assert cli.main(["warm", "demo", str(tmp_path / "a.md")]) == 0
    assert "waiting, 2 before" in drawn[0] and "256/1024 tokens" in drawn[1] and drawn[2:] == [bar.ERASE]
    assert capsys.readouterr().out.startswith("1,024 tokens: ")


def test_json_is_one_object_with_what_the_text_says(running: Daemon, capsys: Shown, tmp_path: Path) -> None:
    def answer(*words: str) -> dict[str, Any]:
        assert cli.main([*words, "--json"]) == 0
        shown = capsys.readouterr()
        assert shown.err == ""
        found: dict[str, Any] = json.loads(shown.out)
        return found

    (tmp_path / "a.md").write_text("A manual.")
    loaded = answer("load", "demo")
    assert (loaded["model"], loaded["state"]) == ("demo", "loaded") and loaded["weights_bytes"] > 0
    warmed = answer("warm", "demo", str(tmp_path / "a.md"), "--pin")
    assert (warmed["model"], warmed["pinned"]) == ("demo", True) and "stored_tokens" in warmed["stats"]
    assert answer("unload", "demo") == {"model": "demo", "unloaded": True}
    assert answer("unload", "demo") == {"model": "demo", "unloaded": False}
    assert answer("stop", "--now") == {"stopped": True}
    assert answer("stop") == {"stopped": False}


def test_a_pull_with_json_leaves_stdout_to_the_object(running: Daemon, capsys: Shown) -> None:
    assert cli.main(["pull", str(tiny_model(running.home / "weights")), "--name", "mine", "--json"]) == 0
    pulled = json.loads(capsys.readouterr().out)
    assert (pulled["name"], pulled["folder"]) == ("mine", str(running.home / "weights"))
    assert len(pulled["fingerprint"]) > 8
    assert cli.main(["pull", str(running.home / "weights"), "--name", "mine", "--json"]) == 0
    again = capsys.readouterr()
    assert json.loads(again.out) == pulled and "brought in before" in again.err


@pytest.mark.parametrize(
    ("content", "words", "said"),
    [
        (b"caf\xe9", ["warm", "demo", "FILE"], "not UTF-8 (byte 3)"),
        (b"", ["explain", "demo", "FILE"], "nothing to read"),
        (b"x", ["warm", "demo", "FILE", "--raw", "-s", "S"], "--raw takes no --system"),
        (b"x", ["warm", "nosuch", "FILE"], "no model named 'nosuch'"),
        (b"x", ["explain", "demo", "/none.txt"], "/none.txt"),
        (b"x", ["load", "nosuch"], "nosuch"),
    ],
)
def test_bad_input_is_one_line_and_65(
    running: Daemon, capsys: Shown, tmp_path: Path, content: bytes, words: list[str], said: str
) -> None:
    file = tmp_path / "doc"
    file.write_bytes(content)
    assert cli.main([str(file) if word == "FILE" else word for word in words]) == 65
    shown = capsys.readouterr().err
    assert said in shown
    assert len(shown.splitlines()) == 1


@pytest.mark.parametrize("verb", ["stats", "ls", "verify", "gc", "rebuild"])
def test_cache_verbs_ask_the_daemon(running: Daemon, capsys: Shown, verb: str) -> None:
    until(lambda: running.status()["store"]["available"], "the store is open")
    assert cli.main(["cache", verb]) == 0
    assert capsys.readouterr().out.strip()
    assert cli.main(["cache", "pin", "abcdef"]) == 65
    assert running.count("kvd_requests_total", "cache") == 2


def test_reload_says_what_changed_and_what_waits_for_a_restart(running: Daemon, capsys: Shown) -> None:
    (running.home / "kvd.toml").write_text('[store]\nlimit = "1 GiB"\n[cache]\nblock_size = 64\n')
    assert cli.main(["config", "reload"]) == 0
    assert capsys.readouterr().out.splitlines() == ["store.limit changed", "cache.block_size needs a restart"]
    assert cli.main(["config", "reload"]) == 0
    (running.home / "kvd.toml").write_text("[store]\nlimt = 1\n")
    assert cli.main(["config", "reload"]) == 65
    assert "did you mean store.limit" in capsys.readouterr().err


def test_a_second_daemon_is_refused_with_the_pid_of_the_first(running: Daemon, capsys: Shown) -> None:
    assert cli.main(["serve"]) == 75
    assert str(running.process.pid) in capsys.readouterr().err


def test_stop_waits_until_it_is_gone_and_a_second_stop_is_no_error(running: Daemon, capsys: Shown) -> None:
    (running.home / "kvd.toml").write_text('[daemon]\ndrain = "500ms"\n')
    with running.client() as client:
        client.ask("generate", {"prompt": "hold"}, "demo")
        until(lambda: running.status()["requests"], "the request runs")
        assert cli.main(["stop"]) == 0
    assert holder(Home(running.home)) is None
    assert "stopped" in capsys.readouterr().out
    assert running.process.wait(5) == 0
    assert cli.main(["stop", "--now"]) == 0
    assert "not running" in capsys.readouterr().err
    assert cli.main(["status"]) == 69


def test_stop_waits_as_long_as_the_daemon_may_take_to_end(monkeypatch: pytest.MonkeyPatch, capsys: Shown) -> None:
    """A worker that has to be killed, then a store whose disk hangs."""
    now = [0.0]
    longest = STOP_GRACE_S + STORE_CLOSE_S + LINGER_MS / 1000
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: now.append(now.pop() + s))
    monkeypatch.setattr(stop, "time", clock)
    monkeypatch.setattr(stop, "Client", lambda **_: nullcontext(SimpleNamespace(shutdown=lambda drain_s: None)))
    monkeypatch.setattr(stop, "holder", lambda home: 7 if now[0] < longest + 1 else None)
    assert cli.main(["stop", "--now"]) == 0
    monkeypatch.setattr(stop, "holder", lambda home: 7)
    assert cli.main(["stop", "--now"]) == 75
    assert "process 7 is still stopping" in capsys.readouterr().err


@pytest.mark.parametrize("then, looks", [([7, 0, None], 4), ([7, 0, 8], 4), ([None], 2)])
def test_stop_waits_for_the_daemon_that_it_stops_and_not_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch, capsys: Shown, then: list[int | None], looks: int
) -> None:
    """It wipes its pid before it lets go of the lock; one that a service manager starts may take that at once."""
    seen: list[int | None] = []
    held = iter([7, *then])
    monkeypatch.setattr(stop, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda s: None))
    monkeypatch.setattr(stop, "Client", lambda **_: nullcontext(SimpleNamespace(shutdown=lambda drain_s: None)))
    monkeypatch.setattr(stop, "holder", lambda home: seen.append(next(held)) or seen[-1])
    assert cli.main(["stop"]) == 0
    assert len(seen) == looks and "stopped" in capsys.readouterr().out
