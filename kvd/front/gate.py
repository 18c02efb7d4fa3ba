"""Keeps connections below the descriptor limit. libzmq aborts the process when `accept` finds no descriptor, and polls
without rest when it must not accept, so the socket's file is renamed away before that: who connects then finds nobody
and tries again, as ZeroMQ clients do by themselves."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import zmq

from kvclient import descriptors as open_files
from kvclient.errors import BadRequest
from kvd.front.lane import Lane

AWAY = ".full"
AGAIN_S = 0.25
NEEDED = 256
"""descriptors: a daemon with a model has 31 without clients, and takes these while less than a fifth of all are open"""


def raise_limit() -> int:
    """Set the soft limit of descriptors to what the hard one allows, at most 10,240; returns it. Raises BadRequest for
    less than NEEDED: the daemon would refuse everybody, for ever."""
    most = open_files.raise_limit()
    if most < NEEDED:
        raise BadRequest(
            f"{most} open files are too few, kvd needs {NEEDED}: raise the hard limit where it was set"
            f" (`ulimit -n {NEEDED}`, LimitNOFILE={NEEDED} in a unit)", limit=most, needed=NEEDED,
        )  # fmt: skip
    return most


def descriptors() -> int:
    return len(os.listdir("/dev/fd"))


class Gate:
    """Watches one bound socket. Between two counts only accepted connections are added up, so a flood is noticed at
    once and an idle daemon does nothing."""

    def __init__(
        self, socket: zmq.Socket[bytes], path: Path, most: int, on_shut: Callable[[], None],
        count: Callable[[], int] = descriptors,
    ) -> None:  # fmt: skip
        self._path = path
        self._away = path.with_name(path.name + AWAY)
        self._most = most
        self._on_shut = on_shut
        self._count = count
        self._open = count()
        self._timer: asyncio.TimerHandle | None = None
        self._socket = socket
        self._lane = Lane(socket.get_monitor_socket(zmq.EVENT_ACCEPTED), lambda _: self._accepted())

    @property
    def shut(self) -> bool:
        return self._timer is not None

    def _accepted(self) -> None:
        self._open += 1
        if self._open >= self._most and not self.shut:
            self._open = self._count()
            if self._open >= self._most:
                os.rename(self._path, self._away)
                self._on_shut()
                self._later()

    def _later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(AGAIN_S, self._look)

    def _look(self) -> None:
        self._open = self._count()
        if self._open < self._most * 9 // 10:
            self._timer = None
            os.rename(self._away, self._path)
        else:
            self._later()

    def close(self) -> None:
        """Call before the socket is closed, which unlinks its path by name."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            os.rename(self._away, self._path)
        self._socket.disable_monitor()
        self._lane.close()
