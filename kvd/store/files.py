"""The narrow door to the file system: everything the store does with files goes through `Files`.

`RealFiles` is the real one; `faults.FaultyFiles` wraps it and fails, tears, delays, fills up or vanishes on demand.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat as modes
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

IOV_MAX: Final = min(1024, os.sysconf("SC_IOV_MAX") if hasattr(os, "sysconf") else 16)
CALL_MAX: Final = 1 << 30
"""bytes per vectored call: Linux stops at 2 GiB - 4096 with a short count, macOS fails with EINVAL"""
POINTS: Final = (
    "after_temp", "after_fsync", "after_rename", "after_dirsync", "before_commit", "after_commit", "mid_evict",
)
"""Moments of a shard's life at which fault campaigns kill the process."""
_NO_FULL_FSYNC: Final = frozenset({errno.ENOTSUP, errno.EINVAL, errno.ENOTTY})
"""Volumes (network, FAT) that do not know F_FULLFSYNC; fsync is all they have."""
TEMP_SUFFIX: Final = ".tmp"


class Item(NamedTuple):
    """One name in a folder. `size` and `allocated` in bytes (allocated as `du` counts), `mtime` in seconds."""

    name: str
    size: int
    allocated: int
    mtime: float
    folder: bool


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes of a volume; `free` is what this user may still write."""

    free: int
    total: int


class Files(Protocol):
    """What the store needs of a file system. Every method raises OSError with its errno, as the system call does."""

    def open(self, path: str) -> int: ...
    def create(self, path: str) -> int:
        """A new file, mode 0600; FileExistsError if the name is taken."""

    def close(self, fd: int) -> None: ...
    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill buffers in order; returns the bytes read, fewer than asked at the end of the file."""

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int: ...
    def uncached(self, fd: int) -> None:
        """What is read from now on comes from the drive, as far as the system lets one ask for that."""

    def fsync(self, fd: int) -> None:
        """Out of the page cache, to the drive."""

    def full_fsync(self, fd: int) -> None:
        """Out of the drive's own cache too; on macOS that takes F_FULLFSYNC, elsewhere fsync already does it."""

    def fsync_dir(self, path: str) -> None: ...
    def full_fsync_dir(self, path: str) -> None:
        """As `full_fsync`: everything this drive was given before is durable afterwards."""

    def rename(self, source: str, target: str) -> None:
        """Atomic; replaces `target`."""

    def unlink(self, path: str) -> None: ...
    def mkdir(self, path: str) -> None:
        """Mode 0700; a folder that is there already is fine."""

    def rmdir(self, path: str) -> None: ...
    def list(self, path: str) -> list[Item]:
        """Names in a folder, links not followed; a name that vanishes meanwhile is left out."""

    def stat(self, path: str) -> Item: ...
    def touch(self, path: str, mtime: float) -> None: ...
    def space(self, path: str) -> Space: ...
    def point(self, name: str) -> None:
        """One of POINTS has come."""


class RealFiles:
    """`Files` on the operating system."""

    def open(self, path: str) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe is not waited for

    def create(self, path: str) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def uncached(self, fd: int) -> None:
        if sys.platform == "darwin":
            fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
        elif hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def full_fsync(self, fd: int) -> None:
        if sys.platform == "darwin":
            try:
                fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
                return
            except OSError as problem:
                if problem.errno not in _NO_FULL_FSYNC:
                    raise
        os.fsync(fd)

    def fsync_dir(self, path: str) -> None:
        with _folder(path) as fd:
            self.fsync(fd)

    def full_fsync_dir(self, path: str) -> None:
        with _folder(path) as fd:
            self.full_fsync(fd)

    def rename(self, source: str, target: str) -> None:
        os.replace(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def list(self, path: str) -> list[Item]:
        found = []
        with os.scandir(path) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    found.append(_item(entry.name, entry.stat(follow_symlinks=False)))
        return found

    def stat(self, path: str) -> Item:
        return _item(os.path.basename(path), os.lstat(path))

    def touch(self, path: str, mtime: float) -> None:
        os.utime(path, (mtime, mtime), follow_symlinks=False)

    def space(self, path: str) -> Space:
        volume = os.statvfs(path)
        return Space(volume.f_bavail * volume.f_frsize, volume.f_blocks * volume.f_frsize)

    def point(self, name: str) -> None:
        pass


@contextlib.contextmanager
def _folder(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _item(name: str, found: os.stat_result) -> Item:
    return Item(name, found.st_size, found.st_blocks * 512, found.st_mtime, modes.S_ISDIR(found.st_mode))


def read_into(files: Files, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill all buffers from `offset` on, in as many vectored calls as IOV_MAX and CALL_MAX ask for; returns bytes read,
    fewer than their sum only at the end of the file."""
    done = 0
    for group in _groups(buffers):
        while group:
            got = files.preadv(fd, group, offset + done)
            if got <= 0:
                return done
            done += got
            group = _behind(group, got)
    return done


def write_from(files: Files, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Write all buffers; returns bytes written. Raises OSError when the system takes nothing."""
    done = 0
    for group in _groups(buffers):
        while group:
            got = files.pwritev(fd, group, offset + done)
            if got <= 0:
                raise OSError("the system wrote 0 bytes")
            done += got
            group = _behind(group, got)
    return done


def read_whole(files: Files, path: str, limit: int) -> bytes:
    """A small file. Raises ValueError beyond `limit` bytes."""
    fd = files.open(path)
    try:
        size = files.stat(path).size
        if size > limit:
            raise ValueError(f"{path} has {size} bytes, at most {limit} are read")
        data = bytearray(size)
        return bytes(data[: read_into(files, fd, [memoryview(data)], 0)])
    finally:
        files.close(fd)


def replace_whole(files: Files, path: str, data: bytes, durable: bool = True) -> None:
    """A small file, replaced as a whole: temp, fsync, rename, folder fsync. The old one survives any failure."""
    temp = f"{path}{TEMP_SUFFIX}"
    with contextlib.suppress(FileNotFoundError):
        files.unlink(temp)
    fd = files.create(temp)
    try:
        try:
            write_from(files, fd, [memoryview(data)], 0)
            if durable:
                files.full_fsync(fd)
        finally:
            files.close(fd)
        files.rename(temp, path)
    except BaseException:
        discard(files, temp)
        raise
    if durable:
        files.full_fsync_dir(os.path.dirname(path))


def discard(files: Files, path: str) -> None:
    """Remove what a failure left. A second failure must not hide the first; a leftover is found at the next start."""
    with contextlib.suppress(OSError):
        files.unlink(path)


def _groups(buffers: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Buffers as flat byte views, cut into groups that one vectored call takes."""
    if len(buffers) <= IOV_MAX and sum(map(len, buffers)) <= CALL_MAX and all(map(_flat, buffers)):
        if some := [view for view in buffers if len(view)]:
            yield some
        return
    group: list[memoryview] = []
    room = CALL_MAX
    for view in buffers:
        rest = view if _flat(view) else view.cast("B")
        while len(rest):
            piece = rest[:room]
            group.append(piece)
            rest = rest[len(piece) :]
            room -= len(piece)
            if not room or len(group) == IOV_MAX:
                yield group
                group, room = [], CALL_MAX
    if group:
        yield group


def _flat(view: memoryview) -> bool:
    return view.format == "B" and view.ndim == 1


def _behind(group: list[memoryview], done: int) -> list[memoryview]:
    """What of the group is left after `done` bytes."""
    for i, view in enumerate(group):
        if done < len(view):
            return [view[done:], *group[i + 1 :]]
        done -= len(view)
    return []
