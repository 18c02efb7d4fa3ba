"""A disk whose reads wait until a test lets them."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence

from kvd.store.files import RealFiles
from tests.worker.rig import PATIENCE


class Gate(RealFiles):
    """Reads of rows that `holds` wait while the gate is closed. `fails(fd)`: such a read is to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()
        self.reached = threading.Event()
        self.fails: Callable[[int], bool] = lambda fd: False

    def holds(self, fd: int, offset: int) -> bool:
        return offset > 0

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.holds(fd, offset):
            self.reached.set()
            assert self.opened.wait(PATIENCE)
            if self.fails(fd):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().preadv(fd, buffers, offset)
