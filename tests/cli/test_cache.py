"""`kvd cache` without a daemon: the store itself, under the home's lock."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd import config
from kvd.cli import main as cli
from kvd.front.storelike import DISK, open_store
from kvd.home import Home, Lock
from kvd.models.record import Record, write_record
from torments.actor import Actor
from torments.blocks import NAMESPACE


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    with tempfile.TemporaryDirectory(prefix="kvd", dir="/tmp") as folder:
        monkeypatch.setenv("KVD_HOME", folder)
        monkeypatch.setenv("KVD_AUTOSTART", "1")
        monkeypatch.delenv("KVD_SOCKET", raising=False)
        yield Home(Path(folder))


@pytest.fixture
def store(home: Home) -> None:
    """An empty one, as `kvd serve` leaves it."""
    home.create()
    open_store(config.load()).close()


@pytest.mark.parametrize(
    "words", [["stats"], ["ls"], ["verify"], ["gc"], ["rebuild"], ["clear", "--yes"], ["pin", "abcd"]]
)
def test_where_no_store_is_yet_it_says_so_and_makes_nothing(
    home: Home, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVD_HOME", str(home.root / "new"))
    assert cli.main(["cache", *words]) == 65
    shown = capsys.readouterr().err
    assert shown == f"kvd: no store yet: {home.root}/new/store is begun by `kvd serve`\n"
    assert list(home.root.iterdir()) == []


def test_an_import_where_no_store_is_yet_says_how_to_get_one(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", "import", "f"]) == 65
    shown = capsys.readouterr().err
    assert "is begun by `kvd serve`; ask the model once (`kv -m NAME hello`), then import again" in shown


def test_a_home_with_models_only_gets_no_store_by_a_look(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    home.create()
    assert cli.main(["cache"]) == 65
    assert "no store yet" in capsys.readouterr().err
    assert list(home.store.iterdir()) == [] and not (home.run / DISK).exists()


def test_a_store_elsewhere_is_found_though_the_home_is_new(
    home: Home, store: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    new = home.root / "new"
    new.mkdir()
    (new / "kvd.toml").write_text(f'[store]\npath = "{home.store}"\n')
    monkeypatch.setenv("KVD_HOME", str(new))
    assert cli.main(["cache", "stats"]) == 0
    assert str(home.store) in capsys.readouterr().out


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("verb", ["stats", "ls", "verify", "gc", "rebuild"])
def test_each_verb_works_offline_and_starts_no_daemon(
    home: Home, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["cache", verb, "--json"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)
    assert cli.main(["cache", verb]) == 0
    assert capsys.readouterr().out.strip()
    assert not home.socket.exists()


def test_a_lower_limit_that_takes_blocks_says_so_whatever_is_asked(
    home: Home, store: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_store(config.load()) as full:
        actor = Actor(full)
        for number in range(200):
            actor.put([number, 1, 2])
    (home.root / "kvd.toml").write_text('[store]\nlimit = "2MB"\n')
    assert cli.main(["cache", "ls"]) == 0
    assert "of them pinned: the store held more than store.limit" in capsys.readouterr().err
    assert cli.main(["cache", "ls"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("store")
def test_clear_wants_a_yes(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", "clear"]) == 2
    assert "--yes" in capsys.readouterr().err
    assert cli.main(["cache", "clear", "--yes"]) == 0


def test_a_clear_of_one_model_says_who_shares_its_blocks(
    home: Home, store: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_store(config.load()) as full:
        Actor(full).put([1, 2, 3])
        for name in ("demo", "two", "three"):
            full.label(NAMESPACE, name)
    assert cli.main(["cache", "clear", "--model", "two"]) == 2
    assert "those of demo and three as well (same weights); say --yes" in capsys.readouterr().err
    assert cli.main(["cache", "clear", "--model", "two", "--yes"]) == 0
    assert capsys.readouterr().err == "kvd: the blocks were those of demo and three as well: same weights\n"
    assert cli.main(["cache", "clear", "--model", "two"]) == 2
    assert "demo" not in capsys.readouterr().err


def test_an_alias_clears_what_its_model_has_and_the_name_of_a_removed_model_what_that_had(
    home: Home, store: None, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = home.models / "demo"
    demo.mkdir(parents=True)
    write_record(demo, Record("demo", "test", 0.0))
    (demo / "config.json").write_text("{}")
    home.config.write_text('[models]\naliases = {"claude-*" = "demo", "lost" = "gone"}\n')
    other = bytes(reversed(NAMESPACE))
    with open_store(config.load()) as full:
        Actor(full).put([1, 2, 3])
        full.label(NAMESPACE, "demo")
        full.label(other, "claude-removed")
    assert cli.main(["cache", "clear", "--model", "claude-opus"]) == 2
    assert "cache clear drops blocks of demo that cost time to compute; say --yes" in capsys.readouterr().err
    assert cli.main(["cache", "ls", "--model", "claude-opus", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["model"] == "demo" and {node["model"] for node in listed["prefixes"]} == {"demo"}
    assert cli.main(["cache", "clear", "--model", "lost", "--yes"]) == 65
    assert "'lost' is an alias of 'gone'" in capsys.readouterr().err
    for name, model, checked in (("claude-removed", "claude-removed", 0), ("claude-opus", "demo", 1)):
        assert cli.main(["cache", "clear", "--model", name, "--yes", "--json"]) == 0
        cleared = json.loads(capsys.readouterr().out)
        assert (cleared["model"], cleared["checked"]) == (model, checked)


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (["export", "abcdef"], "takes CHAIN FILE", 2),
        (["stats", "more"], "takes nothing", 2),
        (["gc", "--model", "m"], "takes no --model", 2),
        (["import", "/none.kvd"], "/none.kvd", 65),
        (["pin", "abcdef"], "abcdef", 65),
        (["pin", "ab"], "ab", 65),
        (["pin", "zzzz"], "'zzzz' is not hexadecimal", 65),
        (["stats", "--force"], "takes no --force", 2),
    ],
)
def test_mistakes_are_one_line_and_say_whose(
    home: Home, words: list[str], said: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["cache", *words]) == code
    shown = capsys.readouterr().err
    assert said in shown
    assert len(shown.splitlines()) == 1


def test_an_export_replaces_no_file_unasked(
    home: Home, store: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(config.load()) as full:
        Actor(full).put([1, 2, 3])
        (slot,) = full.core.table
    target = home.root / "f.kvd"
    words = ["cache", "export", slot.chain.hex(), str(target)]
    assert cli.main(["cache", "export", slot.chain.hex(), str(home.root / "no" / "f.kvd")]) == 65
    assert f"{home.root}/no is no folder" in capsys.readouterr().err
    target.write_text("mine")
    assert cli.main(words) == 65
    assert "is there already; say --force" in capsys.readouterr().err
    for answer in ("n", ""):
        monkeypatch.setattr("sys.stdin", Terminal(answer + "\n"))
        assert cli.main(words) == 65
    assert target.read_text() == "mine"
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert cli.main(words) == 0 and target.read_bytes().startswith(b"kvd-export")
    target.write_text("mine")
    assert cli.main([*words, "--force"]) == 0 and target.read_bytes().startswith(b"kvd-export")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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
    open_store(config.load()).close()
    assert cli.main(["cache", "stats"]) == 0
    assert json.loads((home.run / DISK).read_text())["root"] == str(home.store)
