"""The home folder is private and has one owner at a time."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvclient.errors import BadRequest
from kvd.home import Home, HomeLocked, Lock, check_owner, holder


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    before = os.umask(0o022)
    made = Home(tmp_path / "home")
    made.create()
    yield made
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_every_folder_is_private_and_so_is_what_is_made_later(home: Home) -> None:
    for folder in (home.root, *(p for p in home.root.rglob("*") if p.is_dir())):
        assert mode(folder) == 0o700
    (home.logs / "x").write_text("x")
    assert mode(home.logs / "x") == 0o600


def test_an_open_home_is_closed(tmp_path: Path) -> None:
    root = tmp_path / "home"
    root.mkdir(mode=0o755)
    Home(root).create()
    assert mode(root) == 0o700


def test_a_folder_for_everybody_is_refused_and_stays_open(tmp_path: Path) -> None:
    root = tmp_path / "shared"
    root.mkdir()
    root.chmod(0o1777)
    with pytest.raises(BadRequest, match="everybody"):
        Home(root).create()
    assert mode(root) == 0o1777


def test_a_file_in_the_way_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    with pytest.raises(BadRequest, match="cannot use"):
        Home(tmp_path / "home").create()


def test_a_folder_that_others_can_write_is_refused_for_sockets(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(BadRequest, match="other users"):
        check_owner(tmp_path)
    tmp_path.chmod(0o1777)
    check_owner(tmp_path)


HOLD = "import sys; from pathlib import Path; from kvd.home import Home, Lock; Lock(Home(Path(sys.argv[1]))).acquire(); print('held', flush=True); sys.stdin.read()"  # noqa: E501


def test_a_second_owner_is_refused_with_the_pid_of_the_first(home: Home) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(home.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as first:
        assert first.stdout is not None and first.stdout.readline()
        with pytest.raises(HomeLocked) as refused:
            Lock(home).acquire()
        assert refused.value.details["pid"] == first.pid
        assert str(first.pid) in str(refused.value)
        assert holder(home) == first.pid
        first.kill()
        first.wait()
    assert holder(home) is None
    with Lock(home):
        assert holder(home) == os.getpid()
    assert holder(home) is None


def test_whoever_looks_who_owns_a_home_is_no_owner(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    assert holder(home) is None
    with Lock(home):
        pass
    look = os.open(home.lock, os.O_RDONLY)
    fcntl.flock(look, fcntl.LOCK_SH | fcntl.LOCK_NB)
    assert holder(home) is None
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda s: os.close(look))
    monkeypatch.setattr("kvd.home.time", clock)
    with Lock(home):
        assert holder(home) == os.getpid()
