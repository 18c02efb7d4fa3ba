"""Where a client meets ZeroMQ: one context, the path of the daemon, and sockets made for requests."""

from __future__ import annotations

import itertools
import socket as sockets
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import zmq

from kvclient import wire
from kvclient.core import request
from kvclient.errors import Busy, Cancelled, KvdError, Unreachable
from kvclient.paths import control_path

if TYPE_CHECKING:
    from kvclient.link import Exchange

Socket = zmq.Socket[bytes]

FULL_SUFFIX: Final = ".full"
CANCEL_LINGER_MS: Final = 1000
"""How long a cancel may take to leave after its socket was closed."""
NEVER_MS: Final = 10**9
"""A request is never sent to a second daemon. Not -1: libzmq 4.3.5 then drops what was received but not yet read, and
aborts the process if that is in the middle of a message."""
MAX_SOCKETS: Final = 32_768
"""Streams at once are limited by this process's descriptors, not by ZeroMQ's usual 1,023 sockets."""
NUMBERS = itertools.count()
BROKEN: Final = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL \
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
LOST: Final = BROKEN | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
"""Events of a connection that is no more (BROKEN, whatever follows), or never will be."""


def probe(path: Path, name: Path | None = None) -> None:
    """One plain connect, because a ZeroMQ connect to nobody waits for ever. Raises Unreachable, or Busy for a daemon
    that lives but takes no further connection: near the limit of its descriptors it moves its socket aside. `name` is
    the socket that errors name, where that is another one."""
    name = name or path
    try:
        plain = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    except OSError as problem:
        raise Busy(f"no further connection can be opened: {problem.strerror}") from None
    with plain:
        plain.setblocking(False)
        try:
            plain.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            if path.with_name(path.name + FULL_SUFFIX).exists():
                raise Busy(f"the daemon at {name} has no connection left", socket=str(name)) from None
            raise Unreachable(
                f"no daemon at {name}; start it with `kvd start`", socket=str(name), absent=True
            ) from None
        except BlockingIOError:
            raise Busy(f"the daemon at {name} takes no connection: its queue is full", socket=str(name)) from None
        except OSError as problem:
            raise Unreachable(f"no way to {name}: {problem.strerror or problem}", socket=str(name)) from None


def address(path: Path) -> str:
    return f"ipc://{path}"


class Hub:
    """Any thread may use it. Sockets are made only while it is open, under its lock: libzmq aborts the process when one
    is made while its context ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._context: zmq.Context[Socket] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._lock = threading.Lock()
        self._closed = False
        self._running: weakref.WeakSet[Exchange] = weakref.WeakSet()

    def dealer(self, linger_ms: int) -> Socket:
        """Raises Cancelled when the client was closed, Busy when this process has no descriptor left."""
        made = self._socket(zmq.DEALER)
        made.setsockopt(zmq.LINGER, linger_ms)
        made.setsockopt(zmq.MAXMSGSIZE, wire.MAX_BODY)
        made.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
        return made

    def watched(self, linger_ms: int) -> tuple[Socket, Socket]:
        """A DEALER and the events of its connection that are LOST. Raises what `dealer` raises.

        pyzmq's `get_monitor_socket` names its address by a descriptor, which may be in use again before ZeroMQ has let
        go of the address of the socket that had it before."""
        made = self.dealer(linger_ms)
        place = f"inproc://events.{next(NUMBERS)}"
        try:
            made.monitor(place, LOST)
            events = self._socket(zmq.PAIR)
            events.connect(place)
        except KvdError:
            made.close()
            raise
        except zmq.ZMQError as problem:
            made.close()
            raise _refused(problem) from None
        return made, events

    def add(self, exchange: Exchange) -> None:
        """It will be closed with the client."""
        with self._lock:
            self._running.add(exchange)

    def running(self) -> list[Exchange]:
        with self._lock:
            return list(self._running)

    def cancel(self, id: str) -> None:
        """On the control lane, without waiting for an answer: the caller no longer wants one. Where it cannot be sent
        (the client is being closed) the daemon still sees that the request's own socket is gone."""
        with suppress(zmq.ZMQError, KvdError):
            probe(control_path(self.path))  # else closing would wait for a daemon that is not there
            with self.dealer(CANCEL_LINGER_MS) as lane:
                lane.connect(address(control_path(self.path)))
                lane.send_multipart(request("cancel", {"id": id}).message.frames(), zmq.DONTWAIT)

    def close(self) -> None:
        """Cancels what runs. Exchanges that another thread waits on are left to that thread: the end of the context
        wakes it."""
        for exchange in self.running():
            if exchange.lock.acquire(blocking=False):
                try:
                    exchange.close()
                finally:
                    exchange.lock.release()
            elif not exchange.finished:
                self.cancel(exchange.request.id)
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._context.term()

    def _socket(self, kind: int) -> Socket:
        with self._lock:
            if self._closed:
                raise Cancelled("the client was closed")
            try:
                return self._context.socket(kind)
            except zmq.ZMQError as problem:
                raise _refused(problem) from None


def _refused(problem: zmq.ZMQError) -> KvdError:
    if isinstance(problem, zmq.ContextTerminated):
        return Cancelled("the client was closed")
    return Busy(f"no further connection can be opened: {problem.strerror}")
