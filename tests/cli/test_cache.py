"""`kvd cache` without a daemon: the store itself, under the home's lock."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.cli import main as cli
from kvd.front.storelike import DISK
from kvd.home import Home, Lock


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    with tempfile.TemporaryDirectory(prefix="kvd", dir="/tmp") as folder:
        monkeypatch.setenv("KVD_HOME", folder)
        monkeypatch.setenv("KVD_AUTOSTART", "1")
        monkeypatch.delenv("KVD_SOCKET", raising=False)
        yield Home(Path(folder))


@pytest.mark.parametrize("verb", ["stats", "ls", "verify", "gc", "rebuild"])
def test_each_verb_works_offline_and_starts_no_daemon(
    home: Home, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["cache", verb, "--json"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)
    assert cli.main(["cache", verb]) == 0
    assert capsys.readouterr().out.strip()
    assert not home.socket.exists()


def test_clear_wants_a_yes(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", "clear"]) == 2
    assert "--yes" in capsys.readouterr().err
    assert cli.main(["cache", "clear", "--yes"]) == 0


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (["export", "abcdef"], "takes CHAIN FILE", 2),
        (["stats", "more"], "takes nothing", 2),
        (["gc", "--model", "m"], "takes no --model", 2),
        (["import", "/none.kvd"], "/none.kvd", 65),
        (["pin", "abcdef"], "abcdef", 65),
        (["pin", "ab"], "ab", 65),
    ],
)
def test_mistakes_are_one_line_and_say_whose(
    home: Home, words: list[str], said: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["cache", *words]) == code
    shown = capsys.readouterr().err
    assert said in shown
    assert len(shown.splitlines()) == 1


def test_a_home_in_use_is_refused_with_the_pid(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    home.create()
    with Lock(home):
        assert cli.main(["cache", "gc"]) == 75
    import os

    assert str(os.getpid()) in capsys.readouterr().err


def test_a_store_is_not_begun_while_the_disk_of_the_last_one_is_not_mounted(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    home.create()
    (home.run / DISK).write_text(json.dumps({"root": str(home.store), "mount": "/no/such/mount"}))
    assert cli.main(["cache", "stats"]) == 70
    shown = capsys.readouterr().err
    assert "/no/such/mount, which is not mounted now" in shown and len(shown.splitlines()) == 1
    assert list(home.store.iterdir()) == []
    (home.run / DISK).unlink()
    assert cli.main(["cache", "stats"]) == 0
    assert json.loads((home.run / DISK).read_text())["root"] == str(home.store)
