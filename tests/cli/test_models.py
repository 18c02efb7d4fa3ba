"""`kvd models` with a daemon and without: the same of what is on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.cli import main as cli
from tests.front.serve import HUNG
from tests.front.support import Daemon, daemon

Shown = pytest.CaptureFixture[str]


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    with daemon() as made:
        made.add("big", weights=3 << 20)
        config = made.home / "models/big/config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 777}))
        monkeypatch.setenv("KVD_HOME", str(made.home))
        monkeypatch.delenv("KVD_SOCKET", raising=False)
        yield made


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def test_a_model_that_is_not_loaded_shows_its_size_on_disk_with_a_daemon_and_without(
    running: Daemon, capsys: Shown
) -> None:
    for stopped in (False, True):
        if stopped:
            running.stop()
        assert cli.main(["models", "--json"]) == 0
        rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
        for name, limit in (("big", 777), ("demo", None)):
            assert rows[name]["disk_bytes"] == size(running.home / "models" / name)
            assert (rows[name]["context_length"], rows[name]["state"]) == (limit, "not loaded")
        assert cli.main(["models"]) == 0
        head, big, demo = capsys.readouterr().out.splitlines()
        assert "ON DISK" in head and "3 MiB" in big and " B" in demo


def test_a_model_whose_disk_hangs_is_listed_as_it_was_and_that_is_said(running: Daemon, capsys: Shown) -> None:
    assert cli.main(["models"]) == 0
    before = capsys.readouterr()
    (running.home / HUNG).symlink_to(running.home / "models/big")
    assert cli.main(["models"]) == 0
    after = capsys.readouterr()
    (running.home / HUNG).unlink()
    assert after.out == before.out and not before.err
    assert "kvd: big: the disk of its files has not answered for" in after.err


def test_a_model_whose_files_are_gone_is_listed_with_the_reason(running: Daemon, capsys: Shown) -> None:
    running.stop()
    (running.home / "models/big/config.json").unlink()
    assert cli.main(["models", "--json"]) == 0
    [big] = [row for row in json.loads(capsys.readouterr().out) if row["name"] == "big"]
    assert "the files of model big are gone" in big["problem"] and "disk_bytes" not in big
    assert cli.main(["models"]) == 0
    assert "big" in capsys.readouterr().out


def test_aliases_are_shown_beside_their_model_with_a_daemon_and_without(running: Daemon, capsys: Shown) -> None:
    assert cli.main(["models"]) == 0
    assert "ALIASES" not in capsys.readouterr().out
    aliases = '{"claude-*" = "big", "gpt-4o" = "big", "demo" = "big"}'
    (running.home / "kvd.toml").write_text(f"[models]\naliases = {aliases}\n")
    assert cli.main(["config", "reload"]) == 0
    assert capsys.readouterr().out == "models.aliases changed\n"
    for stopped in (False, True):
        if stopped:
            running.stop()
        assert cli.main(["models"]) == 0
        head, big, demo = capsys.readouterr().out.splitlines()
        assert head.split()[-1] == "ALIASES" and big.endswith("claude-*, gpt-4o") and "claude" not in demo
        assert cli.main(["models", "--json"]) == 0
        rows = {row["name"]: row["aliases"] for row in json.loads(capsys.readouterr().out)}
        assert rows == {"big": ["claude-*", "gpt-4o"], "demo": []}
