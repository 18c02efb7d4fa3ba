"""The door to the file system does what its words say."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.store.files import IOV_MAX, RealFiles, read_into, replace_whole, write_from


def test_on_macos_a_full_fsync_empties_the_drives_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda fd, command: asked.append(command))
    monkeypatch.setattr(os, "fsync", lambda fd: asked.append("fsync"))
    RealFiles().full_fsync_dir(str(tmp_path))
    RealFiles().fsync_dir(str(tmp_path))
    assert asked == [51, "fsync"]


def test_a_volume_without_full_fsync_gets_a_plain_one_but_an_error_stays_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = [errno.ENOTSUP]
    synced: list[int] = []

    def refuse(fd: int, command: int) -> None:
        raise OSError(number[0], "refused")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    monkeypatch.setattr(os, "fsync", synced.append)
    RealFiles().full_fsync_dir(str(tmp_path))
    assert len(synced) == 1
    number[0] = errno.EIO
    with pytest.raises(OSError):
        RealFiles().full_fsync_dir(str(tmp_path))
    assert len(synced) == 1


class Short(RealFiles):
    """Reads and writes at most 3 bytes per call."""

    calls = 0

    def preadv(self, fd, buffers, offset):  # type: ignore[no-untyped-def]
        self.calls += 1
        return super().preadv(fd, [buffers[0][:3]], offset)

    def pwritev(self, fd, buffers, offset):  # type: ignore[no-untyped-def]
        self.calls += 1
        return super().pwritev(fd, [buffers[0][:3]], offset)


def test_short_reads_and_writes_are_continued(tmp_path: Path) -> None:
    files, path = Short(), str(tmp_path / "f")
    fd = files.create(path)
    assert write_from(files, fd, [memoryview(b"abcde"), memoryview(b""), memoryview(b"fghij")], 0) == 10
    files.close(fd)
    into = bytearray(20)
    fd = files.open(path)
    assert read_into(files, fd, [memoryview(into)[:4], memoryview(into)[4:]], 0) == 10
    files.close(fd)
    assert into[:10] == b"abcdefghij" and files.calls == 8 + 1


def test_more_buffers_than_the_system_takes_go_in_several_calls(tmp_path: Path) -> None:
    files = RealFiles()
    fd = files.create(str(tmp_path / "f"))
    assert write_from(files, fd, [memoryview(b"x")] * (2 * IOV_MAX + 1), 0) == 2 * IOV_MAX + 1
    files.close(fd)


def test_a_replaced_file_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "pins.json"
    replace_whole(RealFiles(), str(path), b"old")

    class NoRename(RealFiles):
        def rename(self, source: str, target: str) -> None:
            raise OSError("no")

    with pytest.raises(OSError):
        replace_whole(NoRename(), str(path), b"new")
    assert path.read_bytes() == b"old"
    replace_whole(RealFiles(), str(path), b"newer")
    assert path.read_bytes() == b"newer" and os.listdir(tmp_path) == ["pins.json"]


def test_a_pipe_where_a_shard_was_is_an_error_and_not_waited_for(tmp_path: Path) -> None:
    """Opening one waits for a writer, and whoever reads shards would wait with it."""
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    code = (
        "import sys; from kvd.store.files import RealFiles, read_into\nfiles = RealFiles()\n"
        "try: read_into(files, files.open(sys.argv[1]), [memoryview(bytearray(8))], 0)\n"
        "except OSError: print('an error')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=10)
    assert done.stdout == "an error\n", done.stderr
