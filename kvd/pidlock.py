"""Who owns a folder: a lock that the kernel releases when its holder dies, on a file that says the holder's pid."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class PidLock:
    """On the file `path`, which is made if need be and never removed."""

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self._fd: int | None = None

    @property
    def lost(self) -> bool:
        """Whether the file that we hold is not the one of this name any more: its folder was deleted, replaced or
        unmounted. A disk that does not answer says nothing."""
        if self._fd is None:
            return False
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False

    def take(self) -> int | None:
        """Without waiting. None: it is held from now on, and our pid is in it; else the pid of its holder, 0 where that
        is not known. Raises OSError."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _pid(fd)
            os.close(fd)
            return pid
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd
        return None

    def holder(self) -> int | None:
        """Pid of who holds it, 0 where that is not known; None when nobody does. Looks do not see each other, but
        whoever takes the lock during one finds it held. Raises OSError."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            return _pid(fd)
        finally:
            os.close(fd)

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _pid(fd: int) -> int:
    text = os.pread(fd, 32, 0).strip()
    return int(text) if text.isdigit() else 0
