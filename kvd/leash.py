"""A child's ties to its parent, a worker's to the front: it must not outlive it by more than a second.

Two ties, since each has a hole: the kernel's death signal exists on Linux only, and a pipe's end of file is seen only
while some thread of ours runs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1
ORPHANED = 71
"""exit status of a child whose parent went away"""


def hold(fd: int) -> None:
    """Called first in a child. `fd` is the reading end of a pipe whose other end only the parent has."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.set_inheritable(fd, False)
    threading.Thread(target=_watch, args=(fd,), name="leash", daemon=True).start()


def _watch(fd: int) -> None:
    while os.read(fd, 1):
        pass
    os._exit(ORPHANED)
