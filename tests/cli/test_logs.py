"""`kvd logs`: following survives a rotation."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvd.cli import main as cli
from kvd.cli.logs import follow, readable


def test_following_goes_on_in_the_new_file_after_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "kvd.log"
    path.write_text("old\n")
    with path.open() as file:
        lines = follow(file, path)
        assert next(lines) == "old\n"
        with path.open("a") as more:
            more.write("last of the old\n")
        os.rename(path, tmp_path / "kvd.log.1")
        path.write_text("first of the new\n")
        assert next(lines) == "last of the old\n"
        assert next(lines) == "first of the new\n"


def test_lines_of_one_request_and_stderr_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVD_HOME", str(tmp_path))
    assert cli.main(["logs"]) == 65
    assert "kvd serve" in capsys.readouterr().err
    (tmp_path / "logs").mkdir()
    lines = [json.dumps({"event": f"e{n}", "request": f"r{n % 2}", "level": "info"}) for n in range(6)]
    (tmp_path / "logs/kvd.log").write_text("\n".join(lines) + "\n")
    (tmp_path / "logs/worker-demo-1.log").write_text("Abort trap\n")
    assert cli.main(["logs", "--request", "r1", "-n", "2"]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["e3", "e5"]
    assert cli.main(["logs", "--request", "r7"]) == 65
    assert "no line of request 'r7'" in capsys.readouterr().err
    assert cli.main(["logs", "--workers"]) == 0
    assert capsys.readouterr().out.splitlines() == ["── worker-demo-1.log", "Abort trap"]


def test_seconds_are_shown_to_a_thousandth() -> None:
    line = json.dumps({"event": "end", "level": "info", "ttft_s": 30.50532577299964, "tokens": 2259})
    assert readable(line).split() == ["info", "end", "ttft_s=30.505", "tokens=2259"]
