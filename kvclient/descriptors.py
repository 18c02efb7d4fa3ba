"""Open files: how many this process may have."""

from __future__ import annotations

import resource
from typing import Final

WANTED: Final = 10240
"""macOS may refuse more"""


def raise_limit() -> int:
    """Set the soft limit of descriptors to what the hard one allows, at most WANTED, unless it is higher; returns it.
    A shell of macOS starts programs with 256, which are 40 requests of a client."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return most if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most
