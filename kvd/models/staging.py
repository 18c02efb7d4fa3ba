"""Putting a model together beside its place, and moving it there as a whole.

    models/.pull-<name>-<random>/   being put together, its .lock held by the process that does it
    models/.old-<name>              the model that a forced pull replaces, for the moment between two renames
    models/.lock                    held by the process that moves models to and from their places
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvclient.errors import BadRequest
from kvd.models.lock import locked

_STAGING, _OLD, _LOCK = ".pull-", ".old-", ".lock"


@contextmanager
def staging(models: Path, name: str) -> Iterator[Path]:
    """A private folder in `models`, locked while in use, removed at the end unless `install` moved it away."""
    models.mkdir(mode=0o700, parents=True, exist_ok=True)
    sweep(models)
    folder, lock = _locked_folder(models, name)
    try:
        yield folder
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def _locked_folder(models: Path, name: str) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{_STAGING}{name}-", dir=models))
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / _LOCK).exists():
            return folder, lock
        os.close(lock)  # a sweep came between the folder's making and its lock, and took it for left over


def sweep(models: Path) -> None:
    """Undo what killed pulls left: staging folders whose lock is free go, a model moved aside for nothing returns."""
    for folder in models.glob(_STAGING + "*"):
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # just being made, or just being removed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)
    with locked(models / _LOCK):
        for old in models.glob(_OLD + "*"):
            place = models / old.name.removeprefix(_OLD)
            if place.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(place)


def install(folder: Path, place: Path, *, force: bool) -> None:
    """Move the finished `folder` to `place`, durably. Raises BadRequest when that is taken and `force` is not set."""
    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
        if path.is_file():
            _sync(path)
    _sync(folder)
    with locked(place.parent / _LOCK):
        old = place.with_name(_OLD + place.name)
        if place.exists() or place.is_symlink():
            if not force:
                raise taken(place.name)
            place.rename(old)
        folder.rename(place)
        (place / _LOCK).unlink(missing_ok=True)
        if old.is_symlink():
            old.unlink()
        shutil.rmtree(old, ignore_errors=True)
        _sync(place.parent)


def taken(name: str) -> BadRequest:
    return BadRequest(f"model {name} exists already; --force replaces it, --name gives another", name=name)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
