"""The home folder: its layout, its modes (0700, files 0600) and the lock that says who owns it.

    $KVD_HOME/  kvd.toml  run/{lock,kvd.sock,workers/}  models/  store/  logs/  lib/  tmp/
"""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from kvclient import paths
from kvclient.errors import BadRequest, Busy
from kvd.pidlock import PidLock

UMASK = 0o077
LOOK_S = 0.5
"""No look at a lock takes that long, on a loaded machine either."""
POLL_S = 0.01


class HomeLocked(Busy):
    """Another process owns the home, or the socket. details: pid (0: unknown), path."""


@dataclass(frozen=True, slots=True)
class Home:
    """Paths under one home; `create` makes the folders."""

    root: Path

    @classmethod
    def default(cls) -> Home:
        return cls(paths.home())

    @property
    def config(self) -> Path:
        return self.root / "kvd.toml"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def lock(self) -> Path:
        return self.run / "lock"

    @property
    def workers(self) -> Path:
        """One file per worker process, named by its pid: who must be gone before the store is opened."""
        return self.run / "workers"

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def lib(self) -> Path:
        return self.root / "lib"

    @property
    def tmp(self) -> Path:
        return self.root / "tmp"

    @property
    def kernels(self) -> Path:
        """What MLX compiled, kept between workers."""
        return self.root / "kernels"

    @property
    def socket(self) -> Path:
        """`KVD_SOCKET` wins over the home's own. Raises BadRequest for a path over the system's limit."""
        if os.environ.get("KVD_SOCKET"):
            return paths.socket_path()
        return paths.checked(self.run / "kvd.sock")

    def create(self) -> None:
        """Make every folder with mode 0700 and set this process's umask to 077. Raises BadRequest when the home cannot
        be used: not a folder, not writable, or of another user."""
        os.umask(UMASK)
        if self.root.is_dir() and self.root.stat().st_mode & stat.S_ISVTX:
            raise BadRequest(f"{self.root} is a folder for everybody; kvd needs one of its own", path=str(self.root))
        folders = (self.root, self.run, self.workers, self.models, self.store, self.logs, self.lib, self.tmp)
        try:
            for folder in folders:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                if folder.stat().st_uid == os.geteuid():
                    folder.chmod(0o700)
        except OSError as problem:
            raise BadRequest(f"cannot use {self.root} as home: {problem.strerror}", path=str(self.root)) from None
        check_owner(self.root)
        check_owner(self.run)


def check_owner(folder: Path) -> None:
    """Raises BadRequest unless `folder` is ours, or root's, and only we can put names into it (or it is sticky)."""
    try:
        found = folder.stat()
    except OSError as problem:
        raise BadRequest(f"cannot use {folder}: {problem.strerror}", path=str(folder)) from None
    if found.st_uid not in (os.geteuid(), 0):
        raise BadRequest(f"{folder} belongs to another user", path=str(folder), uid=found.st_uid)
    open_to_others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if open_to_others and not found.st_mode & stat.S_ISVTX:
        raise BadRequest(
            f"{folder} can be written by other users; use a folder with mode 0700", path=str(folder), mode=found.st_mode
        )


class Lock(PidLock):
    """The lock of a home, held by one daemon or one offline command; or of a socket, by the path of the socket."""

    def __init__(self, owned: Home | Path) -> None:
        super().__init__(owned.lock if isinstance(owned, Home) else owned.with_name(owned.name + ".lock"))
        self._owned = owned.root if isinstance(owned, Home) else owned

    def acquire(self) -> Lock:
        """Take the lock, waiting no longer than somebody may look who holds it. Raises HomeLocked with the holder's
        pid."""
        deadline = time.monotonic() + LOOK_S
        while (pid := self.take()) is not None:
            if time.monotonic() > deadline:
                said = f"{self._owned} is in use by process {pid or '(unknown)'}"
                raise HomeLocked(said, pid=pid, path=str(self.path))
            time.sleep(POLL_S)
        return self

    def release(self) -> None:
        """A next holder that has not written its pid yet is not taken for us."""
        if self._fd is not None:
            os.ftruncate(self._fd, 0)
        super().release()

    def __enter__(self) -> Lock:
        return self if self._fd is not None else self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()


def holder(home: Home) -> int | None:
    """Pid of the process that holds the home's lock; None when nobody does, 0 when it has not written its pid yet."""
    return Lock(home).holder()
