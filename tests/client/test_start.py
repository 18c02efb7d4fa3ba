"""Starting the daemon on demand."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvclient import BadRequest, Client, Unreachable, start
from tests.client.faces import FACES

DAEMON = """
import fcntl, os, socket, sys
home = os.environ["KVD_HOME"]
with open(home + "/started", "a") as log: log.write(f"{os.getpid()}\\n")
lock = open(home + "/run/lock", "w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit("another daemon runs")
open(home + "/served", "a").write(f"{os.getpid()}\\n")
sys.path.insert(0, sys.argv[1])
import pathlib, tempfile, threading
from tests.client import fake
class Served(fake.FakeDaemon):
    pass
tempfile.mkdtemp = lambda **_: home
pathlib.Path.mkdir = lambda *_, **__: None
Served()
threading.Event().wait()
"""
ROOT = str(Path(__file__).parents[2])


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Ends every daemon that was started here."""
    path = Path(tempfile.mkdtemp(prefix="kvd", dir="/tmp"))
    monkeypatch.setenv("KVD_HOME", str(path))
    yield path
    for pid in pids(path, "started"):
        subprocess.run(["kill", "-9", pid], check=False, capture_output=True)
    subprocess.run(["rm", "-rf", str(path)], check=True)


@pytest.fixture
def daemon(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "command", lambda: [sys.executable, "-c", DAEMON, ROOT])


def pids(home: Path, file: str) -> list[str]:
    return (home / file).read_text().split() if (home / file).exists() else []


@pytest.mark.parametrize(("word", "expected"), [("1", True), ("yes", True), ("ON", True), ("0", False), ("no", False)])
def test_the_variable_decides(home: Path, monkeypatch: pytest.MonkeyPatch, word: str, expected: bool) -> None:
    (home / "kvd.toml").write_text(f"[daemon]\nautostart = {'false' if expected else 'true'}\n")
    monkeypatch.setenv("KVD_AUTOSTART", word)
    assert start.allowed(home) is expected


def test_a_variable_that_is_neither_is_an_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVD_AUTOSTART", "perhaps")
    with pytest.raises(BadRequest, match="KVD_AUTOSTART must be 1 or 0, got 'perhaps'"):
        start.allowed(home)


@pytest.mark.parametrize(("text", "expected"), [
    ("[daemon]\nautostart = true\n", True), ("[daemon]\nautostart = false\n", False), ("[daemon]\n", False),
    ("autostart = true\n", False), ("daemon = 5\n", False), ("[daemon\n", False),
    ('[daemon]\nautostart = "true"\n', False),
])  # fmt: skip
def test_the_config_file_decides(home: Path, text: str, expected: bool) -> None:
    (home / "kvd.toml").write_text(text)
    assert start.allowed(home) is expected


def test_nobody_is_started_unasked(home: Path, daemon: None) -> None:
    assert start.allowed(home) is False
    with Client() as kv, pytest.raises(Unreachable, match="start it with `kvd start`"):
        kv.status()
    assert pids(home, "started") == []


@pytest.mark.parametrize("face", FACES)
def test_the_first_call_starts_it_and_says_so(
    home: Path, daemon: None, monkeypatch: pytest.MonkeyPatch, face: str, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVD_AUTOSTART", "1")
    client: Any = FACES[face](home / "run" / "kvd.sock")
    assert client.status() == {"up": True}
    client.close()
    told = capfd.readouterr().err
    assert f"no daemon at {home}/run/kvd.sock" in told and "the daemon is up after" in told
    assert len(pids(home, "served")) == 1


def test_ten_clients_at_once_give_one_daemon(home: Path, daemon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVD_AUTOSTART", "1")
    answers: list[Any] = []

    def ask() -> None:
        with Client(report=lambda line: None) as kv:
            answers.append(kv.status())

    threads = [threading.Thread(target=ask) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [{"up": True}] * 10
    assert len(pids(home, "started")) == len(pids(home, "served")) == 1


def test_a_daemon_that_cannot_start_ends_the_wait_with_its_last_words(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVD_AUTOSTART", "1")
    monkeypatch.setattr(start, "LOSER_S", 0.1)
    monkeypatch.setattr(start, "command", lambda: ["sh", "-c", "echo first; echo the disk is full >&2; exit 1"])
    with Client(report=lambda line: None) as kv, pytest.raises(Unreachable, match="did not start: the disk is full"):
        kv.status()


def test_a_daemon_that_never_listens_is_given_up(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVD_AUTOSTART", "1")
    monkeypatch.setattr(start, "DEADLINE_S", 0.3)
    monkeypatch.setattr(start, "command", lambda: ["sh", "-c", f"echo $$ >> {home}/started; exec sleep 60"])
    with Client(report=lambda line: None) as kv, pytest.raises(Unreachable, match=r"did not start within 0\.3 s"):
        kv.status()


def test_without_a_kvd_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start.sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Unreachable, match="no `kvd` is installed"):
        start.command()


def test_a_socket_elsewhere_starts_nobody(home: Path, daemon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVD_AUTOSTART", "1")
    with Client("/tmp/kvd-elsewhere/kvd.sock") as kv, pytest.raises(Unreachable):
        kv.status()
    assert pids(home, "started") == []


@pytest.mark.parametrize("face", FACES)
def test_a_client_told_to_starts_nobody(
    home: Path, daemon: None, monkeypatch: pytest.MonkeyPatch, face: str
) -> None:
    monkeypatch.setenv("KVD_AUTOSTART", "1")
    client: Any = FACES[face](home / "run" / "kvd.sock", autostart=False)
    with pytest.raises(Unreachable, match="start it with `kvd start`"):
        client.status()
    client.close()
    assert pids(home, "started") == []


def test_shutdown_starts_nobody(home: Path, daemon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVD_AUTOSTART", "1")
    with Client() as kv, pytest.raises(Unreachable):
        kv.shutdown()
    assert pids(home, "started") == []


def test_folders_are_for_the_user_alone(home: Path, daemon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = home / "new"
    monkeypatch.setenv("KVD_HOME", str(inner))
    with start.starting(inner / "run" / "kvd.sock", lambda line: None):
        assert [oct(os.stat(inner / name).st_mode & 0o777) for name in ("", "run", "logs")] == ["0o700"] * 3
