"""`kvd rm`: with a daemon and without, on models of each kind."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from kvd.cli import cache
from kvd.cli import main as cli
from tests.front.support import Daemon

Shown = pytest.CaptureFixture[str]


@pytest.fixture
def running(running: Daemon, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    monkeypatch.setattr(cache, "ask", lambda verb, fields: {"models": {"demo": 3 << 20}})
    return running


def left(running: Daemon) -> list[str]:
    return sorted(path.name for path in (running.home / "models").iterdir() if not path.name.startswith(".lock"))


def test_a_loaded_model_is_refused_until_it_is_unloaded(running: Daemon, capsys: Shown) -> None:
    assert cli.main(["load", "demo"]) == 0
    capsys.readouterr()
    assert cli.main(["rm", "other", "demo", "--yes"]) == 75
    assert capsys.readouterr().err == "kvd: demo is loaded; `kvd unload demo` first\n"
    assert left(running) == ["demo", "other"]
    assert cli.main(["unload", "demo"]) == 0
    capsys.readouterr()
    assert cli.main(["rm", "demo", "--yes"]) == 0
    removed, stays = capsys.readouterr().out.splitlines()
    assert removed.startswith("removed demo (") and removed.endswith(" B)")
    assert stays == "3 MiB of its KV stay in the store; `kvd cache clear --model demo --yes` drops them"
    assert left(running) == ["other"]
    assert [row["name"] for row in running.status()["models"]] == ["other"]


def test_of_a_model_that_is_elsewhere_only_the_way_to_it_goes(running: Daemon, capsys: Shown, tmp_path: Path) -> None:
    running.stop()
    models = running.home / "models"
    shutil.move(models / "demo", tmp_path / "demo")
    (models / "demo").symlink_to(tmp_path / "demo")
    record = json.loads((models / "other/kvd.json").read_text()) | {"path": str(tmp_path / "demo")}
    (models / "other/kvd.json").write_text(json.dumps(record))
    (models / "nowhere").symlink_to(tmp_path / "gone")
    before = sorted((tmp_path / "demo").iterdir())
    assert cli.main(["rm", "demo", "other", "nowhere", "demo", "--yes", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["removed"]
    assert [(row["model"], row["files"]) for row in rows] == [
        ("demo", str(tmp_path / "demo")), ("other", str(tmp_path / "demo")), ("nowhere", str(tmp_path / "gone")),
    ]  # fmt: skip
    assert rows[0] == {"model": "demo", "bytes": 0, "files": str(tmp_path / "demo"), "stored_bytes": 3 << 20}
    assert left(running) == [] and sorted((tmp_path / "demo").iterdir()) == before


def test_it_asks_where_it_can_and_wants_yes_where_it_cannot(
    running: Daemon, capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.stop()

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for answer, kept in (("n\n", ["demo", "other"]), ("", ["demo", "other"]), ("y\n", ["demo"])):
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        assert cli.main(["rm", "other"]) == 0
        said = capsys.readouterr()
        assert "remove other (" in said.err and bool(said.out) == (kept == ["demo"])
        assert left(running) == kept
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert cli.main(["rm", "demo"]) == 2
    assert "needs --yes" in capsys.readouterr().err
    assert left(running) == ["demo"]


@pytest.mark.parametrize("name", ["nosuch", "..", "../models/demo", ".lock"])
def test_what_is_no_model_is_65_and_nothing_goes(running: Daemon, capsys: Shown, name: str) -> None:
    running.stop()
    assert cli.main(["rm", "demo", name, "--yes"]) == 65
    assert name in capsys.readouterr().err
    assert left(running) == ["demo", "other"]
