"""A client for verbs that look at a daemon: asking whether one runs must not start one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvclient import Client


def running(socket: Path | None = None) -> Client:
    """Of `socket`, else of this home's. Raises Unreachable at its first call when no daemon runs, whatever the
    configuration allows."""
    from kvclient import Client

    os.environ["KVD_AUTOSTART"] = "0"
    return Client(socket)
