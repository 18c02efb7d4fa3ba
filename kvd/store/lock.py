"""One owner per store."""

from __future__ import annotations

import os

from kvclient.errors import StoreError
from kvd.pidlock import PidLock


class StoreLock(PidLock):
    """Held from its making on."""

    def __init__(self, path: str) -> None:
        """Take the lock, without waiting. Raises StoreError with the holder's pid (0: not known), OSError."""
        super().__init__(path)
        if (pid := self.take()) is not None:
            root = os.path.dirname(path)
            raise StoreError(f"the store {root} is in use by process {pid or '(unknown)'}", pid=pid, path=root)
