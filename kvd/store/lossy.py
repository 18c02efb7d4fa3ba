"""A drive with a volatile cache, for tests and `tools/torture`: what was not synced does not survive a power cut."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
from collections.abc import Callable

from kvd.store.files import RealFiles


class LossyFiles(RealFiles):
    """A drive with a volatile cache. `power_cut` puts the folder into a state that a power cut may leave: contents not
    fsynced are dropped, halved or have holes; names not followed by a folder fsync may be undone."""

    def __init__(self, aside: str) -> None:
        """aside: an existing folder on the same volume, where replaced and removed files are kept for undoing."""
        super().__init__()
        self._aside = aside
        self._kept = 0
        self._paths: dict[int, str] = {}
        self._unsynced: dict[str, int] = {}
        self._names: list[tuple[str, Callable[[], None]]] = []

    def create(self, path: str) -> int:
        fd = super().create(path)
        self._paths[fd] = path
        self._unsynced[path] = 0
        self._named(path, lambda: _gone(path))
        return fd

    def close(self, fd: int) -> None:
        self._paths.pop(fd, None)
        super().close(fd)

    def mkdir(self, path: str) -> None:
        new = not os.path.isdir(path)
        super().mkdir(path)
        if new:
            self._named(path, lambda: _gone(path))

    def fsync(self, fd: int) -> None:
        self._unsynced.pop(self._paths.get(fd, ""), None)

    def full_fsync(self, fd: int) -> None:
        self.fsync(fd)

    def fsync_dir(self, path: str) -> None:
        self._names = [(folder, undo) for folder, undo in self._names if folder != path]

    def full_fsync_dir(self, path: str) -> None:
        self.fsync_dir(path)

    def rename(self, source: str, target: str) -> None:
        old = self._keep(target) if os.path.exists(target) else ""
        super().rename(source, target)
        if source in self._unsynced:
            self._unsynced[target] = self._unsynced.pop(source)

        def undo() -> None:
            if os.path.exists(target):
                os.replace(target, source)
            if old:
                os.replace(old, target)

        self._named(target, undo)

    def unlink(self, path: str) -> None:
        if not os.path.lexists(path):
            raise FileNotFoundError(errno.ENOENT, "gone", path)
        old = self._keep(path)
        self._unsynced.pop(path, None)
        self._named(path, lambda: os.replace(old, path))

    def power_cut(self, rng: random.Random) -> None:
        """Lose what a drive may lose. Undoes a random tail of each folder's unsynced names, newest first."""
        cut: dict[str, bool] = {}
        for folder, undo in reversed(self._names):
            if cut.setdefault(folder, rng.random() < 0.7):
                with contextlib.suppress(FileNotFoundError):
                    undo()
                cut[folder] = rng.random() < 0.8
        for path in self._unsynced:
            if os.path.exists(path):
                _tear(path, rng)
        self._names.clear()
        self._unsynced.clear()

    def _named(self, path: str, undo: Callable[[], None]) -> None:
        self._names.append((os.path.dirname(path), undo))

    def _keep(self, path: str) -> str:
        self._kept += 1
        kept = os.path.join(self._aside, str(self._kept))
        os.replace(path, kept)
        return kept


def _gone(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path)
    elif os.path.exists(path):
        os.unlink(path)


def _tear(path: str, rng: random.Random) -> None:
    """Nothing, half, or only the later half of a file's bytes reached the drive."""
    size = os.path.getsize(path)
    kind = rng.randrange(3)
    with open(path, "r+b") as file:
        if kind < 2:
            file.truncate(size // 2 * kind)
        else:
            file.write(bytes(size // 2))
