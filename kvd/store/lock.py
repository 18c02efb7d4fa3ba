"""One owner per store: a lock that the kernel releases when its holder dies."""

from __future__ import annotations

import fcntl
import os

from kvclient.errors import StoreError


class StoreLock:
    def __init__(self, path: str) -> None:
        """Take the lock, without waiting. Raises StoreError with the holder's pid (0: not known)."""
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(self._fd, 32, 0).strip()
            os.close(self._fd)
            pid = int(text) if text.isdigit() else 0
            raise StoreError(
                f"the store {os.path.dirname(path)} is in use by process {pid or '(unknown)'}",
                pid=pid, path=os.path.dirname(path),
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def there(self) -> bool:
        """Is the file that we hold still the one of this name? Not after its folder was deleted, replaced or unmounted;
        a disk that does not answer says nothing."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True

    def release(self) -> None:
        os.close(self._fd)
