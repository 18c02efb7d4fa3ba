"""Where the daemon lives: home folder and sockets, the same answer for every program."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvclient.errors import BadRequest

SOCKET_LIMIT = 104 if sys.platform == "darwin" else 108
"""bytes of `sockaddr_un.sun_path`, the closing NUL included"""
CONTROL_SUFFIX = ".ctl"
LONGEST_SUFFIX = ".w9999"
"""What the longest derived path (the socket to a worker) adds to the request socket's own."""


def home() -> Path:
    """`KVD_HOME`, else the platform's place for application data. Not created here."""
    if value := os.environ.get("KVD_HOME"):
        return Path(value).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "kvd"
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "kvd"


def socket_path() -> Path:
    """Path of the request socket. Raises BadRequest when it, or a path derived from it, is over the system's limit."""
    value = os.environ.get("KVD_SOCKET")
    return checked(Path(value).expanduser().absolute() if value else home() / "run" / "kvd.sock")


def control_path(socket: Path) -> Path:
    """The control lane (cancel, status, shutdown), never queued behind work."""
    return socket.with_name(socket.name + CONTROL_SUFFIX)


def checked(path: Path) -> Path:
    """The path itself. Raises BadRequest where a socket beside it would have a name over the system's limit."""
    size = len(os.fsencode(path)) + len(LONGEST_SUFFIX) + 1
    if size > SOCKET_LIMIT:
        raise BadRequest(
            f"socket path too long: {path} needs {size} bytes, this system allows {SOCKET_LIMIT}; "
            "set KVD_SOCKET to a shorter one",
            path=str(path), size=size, limit=SOCKET_LIMIT,
        )
    return path
