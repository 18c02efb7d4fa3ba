"""A stdout that is full, closed or read by nobody, and files that cannot be read: one line and the contract's code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.cli import main as cli

TABLE = ("config", "show")
"""through rich"""
TEXT = ("config", "doc")
JSON = ("models", "--json")
HELP = ("models", "--help")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVD_HOME", str(tmp_path))
    monkeypatch.setenv("KVD_SOCKET", "/tmp/kvd-none.sock")
    monkeypatch.setenv("PYTHONUNBUFFERED", "")
    return tmp_path


def kvd(*words: str, redirect: str = "") -> subprocess.CompletedProcess[str]:
    line = ["sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, "-m", "kvd.cli.main", *words]
    return subprocess.run(line, capture_output=True, text=True)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("words", [TABLE, TEXT, JSON, HELP])
def test_a_full_stdout_is_one_line_and_70(words: tuple[str, ...]) -> None:
    done = kvd(*words, redirect=">/dev/full")
    assert (done.returncode, done.stderr) == (70, "kvd: cannot write to stdout: No space left on device\n")


@pytest.mark.parametrize("words", [TABLE, TEXT, JSON, HELP])
def test_a_closed_stdout_is_one_line_and_70(words: tuple[str, ...]) -> None:
    done = kvd(*words, redirect=">&-")
    assert (done.returncode, done.stderr) == (70, "kvd: cannot write to stdout: Bad file descriptor\n")


@pytest.mark.parametrize(("words", "code"), [(TABLE, 0), (("status",), 69), (("statsu",), 2)])
def test_a_closed_stderr_and_stdin_change_neither_code_nor_output(words: tuple[str, ...], code: int) -> None:
    done = kvd(*words, redirect="<&- 2>&-")
    assert (done.returncode, done.stdout) == (code, kvd(*words).stdout)


@pytest.mark.parametrize("words", [TABLE, TEXT, JSON, HELP])
def test_a_closed_pipe_ends_quietly_with_141(words: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", "kvd.cli.main", *words], stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_an_error_of_the_system_is_one_line_with_the_file(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / ("x" * 300)))
    assert cli.main(["uninstall"]) == 70
    shown = capsys.readouterr()
    assert (shown.out, len(shown.err.splitlines())) == ("", 1)
    assert shown.err.startswith(f"kvd: {home}/xxx") and "name too long" in shown.err


@pytest.mark.parametrize(("verb", "folder"), [("models", "models"), ("logs", "logs/kvd.log")])
def test_a_home_that_cannot_be_looked_into_is_one_line_and_65(
    home: Path, verb: str, folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name over the system's limit stands for it: root may look into everything else."""
    place = home / ("x" * 300)
    monkeypatch.setenv("KVD_HOME", str(place))
    assert cli.main([verb]) == 65
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", f"kvd: cannot read {place}/{folder}: File name too long\n")
