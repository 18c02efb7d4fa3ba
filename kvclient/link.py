"""The sockets of one request in flight, non-blocking: whoever waits, waits on `descriptors` or `sockets`.

Each request has its own DEALER, so that nothing is shared between threads, a slow reader slows only itself, and a
client that goes away is seen by the daemon as a lost peer.
"""

from __future__ import annotations

import itertools
import socket as sockets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

from kvclient import wire
from kvclient.core import Reply, Request, Watch, received, request
from kvclient.errors import Busy, Cancelled, KvdError, Unreachable
from kvclient.events import Event
from kvclient.paths import control_path

FULL_SUFFIX = ".full"
CANCEL_LINGER_MS = 1000
"""How long a cancel may take to leave after its socket was closed."""
NEVER_MS = 10**9
"""A request is never sent to a second daemon. Not -1: libzmq 4.3.5 then drops what was received but not yet read, and
aborts the process if that is in the middle of a message."""
NUMBERS = itertools.count()
LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL \
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


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
                f"no daemon at {name}; start it with `kvd serve`", socket=str(name), absent=True
            ) from None
        except BlockingIOError:
            raise Busy(f"the daemon at {name} takes no connection: its queue is full", socket=str(name)) from None
        except OSError as problem:
            raise Unreachable(f"no way to {name}: {problem.strerror or problem}", socket=str(name)) from None


def dealer(context: zmq.Context[zmq.Socket[bytes]], linger_ms: int) -> zmq.Socket[bytes]:
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.LINGER, linger_ms)
    made.setsockopt(zmq.MAXMSGSIZE, wire.MAX_BODY)
    made.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
    return made


def address(path: Path) -> str:
    return f"ipc://{path}"


def send_cancel(context: zmq.Context[zmq.Socket[bytes]], path: Path, id: str) -> None:
    """On the control lane, without waiting for an answer: the caller no longer wants one. Where it cannot be sent (the
    context is being closed) the daemon still sees that the request's own socket is gone."""
    with suppress(zmq.ZMQError, KvdError):
        probe(control_path(path))  # else closing the context would wait for a daemon that is not there
        with dealer(context, CANCEL_LINGER_MS) as lane:
            lane.connect(address(control_path(path)))
            lane.send_multipart(request("cancel", {"id": id}).message.frames(), zmq.DONTWAIT)


class Exchange:
    """One request and its replies. Used by one thread at a time; `lock` is held while it is.

    Raises Unreachable when made if no daemon listens at `path`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path, asked: Request) -> None:
        self.request, self.reply = asked, Reply(asked)
        self.lock = threading.Lock()
        self.on_close: Callable[[], None] | None = None
        self._context, self._path = context, path
        target = control_path(path) if asked.control else path
        probe(target, path)
        self._pings: zmq.Socket[bytes] | None = None
        self._ready: deque[Event] = deque()
        self._failure: KvdError | None = None
        self._closed = False
        self._dead = False
        self._watch = Watch(asked, str(path), time.monotonic())
        self._socket, self._monitor = _sockets(context, CANCEL_LINGER_MS if asked.control else 0)
        self._socket.connect(address(target))
        self._socket.send_multipart(asked.message.frames(), zmq.DONTWAIT)

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What to wait on. Their descriptors are edge-triggered: call `poll` until it gives None before each wait."""
        return [one for one in (self._socket, self._monitor, self._pings) if one is not None]

    @property
    def open(self) -> bool:
        """More may come in."""
        return self.reply.open and not self._failure and not self._closed

    @property
    def backlog(self) -> int:
        """Events that `poll` can give without waiting."""
        return len(self._ready)

    @property
    def finished(self) -> bool:
        """Nothing more will come."""
        return self._closed or not (self._ready or self._failure or self.reply.open)

    def wait_s(self) -> float:
        """How long to wait at most before `poll` is called again."""
        return max(0.0, self._watch.wakes() - time.monotonic())

    def poll(self) -> Event | None:
        """The next event, None if there is none yet or the reply is complete (`finished`). Raises the request's error
        once the events before it are taken."""
        if not self._ready:
            self.pump()
        if self._ready:
            return self._ready.popleft()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            self.close()
            raise failure
        if not self.reply.open:
            self.close()
        return None

    def pump(self) -> None:
        """Takes in what has come; `poll` gives it out. Raises nothing."""
        if self.open:
            try:
                self._read()
            except KvdError as problem:
                self._failure = problem
                self._dead = isinstance(problem, Unreachable)

    def result(self) -> dict[str, Any]:
        """Of a verb other than generate, once `finished`. Raises Cancelled if it was closed before its end."""
        if self.reply.open:
            raise Cancelled("the client was closed", id=self.request.id)
        return self.reply.result

    def close(self) -> None:
        """Gives the sockets back; cancels the request if its last reply has not come."""
        if self._closed:
            return
        self._closed = True
        if self.on_close is not None:
            self.on_close()
        self._ready.clear()
        wanted = self.reply.open and not self.request.control and not self._dead
        for one in self.sockets:
            one.close()
        if wanted:
            send_cancel(self._context, self._path, self.request.id)

    def _read(self) -> None:
        lost = self._lost()
        now = time.monotonic()
        while self.reply.open and (frames := _receive(self._socket)) is not None:
            self._watch.heard(now)
            event = self.reply.feed(received(frames))
            if event is not None:
                self._ready.append(event)
        if not self.reply.open:
            return
        if lost:
            self._gone()
        while self._pings is not None and _receive(self._pings) is not None:
            self._watch.pong(now)
        if self._watch.due(now):
            self._ping()

    def _lost(self) -> bool:
        """Asked before the messages are read, so that what came before the loss is still found."""
        lost = False
        while (frames := _receive(self._monitor)) is not None:
            event: int = struct.unpack_from("=H", frames[0])[0]
            lost |= bool(event & LOST)
        return lost

    def _gone(self) -> None:
        if self.request.verb == "shutdown":
            self.reply.open = False
            return
        raise Unreachable(
            f"the daemon at {self._path} went away before the request was done", socket=str(self._path)
        )

    def _ping(self) -> None:
        if self._pings is None:
            self._pings = dealer(self._context, 0)
            self._pings.connect(address(control_path(self._path)))
        try:
            self._pings.send_multipart(request("ping", {}).message.frames(), zmq.DONTWAIT)
        except zmq.Again:
            return


def _sockets(context: zmq.Context[zmq.Socket[bytes]], linger_ms: int) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """A DEALER and the events of its connection. Raises Busy when this process has no descriptor for them.

    pyzmq's `get_monitor_socket` names its address by a descriptor, which may be in use again before ZeroMQ has let go
    of the address of the socket that had it before."""
    made: zmq.Socket[bytes] | None = None
    place = f"inproc://events.{next(NUMBERS)}"
    try:
        made = dealer(context, linger_ms)
        made.monitor(place, LOST)
        events = context.socket(zmq.PAIR)
        events.connect(place)
        return made, events
    except zmq.ContextTerminated:
        raise Cancelled("the client was closed") from None
    except zmq.ZMQError as problem:
        if made is not None:
            made.close()
        raise Busy(f"no further connection can be opened: {problem.strerror}") from None


def _receive(source: zmq.Socket[bytes]) -> list[bytes] | None:
    try:
        return source.recv_multipart(zmq.DONTWAIT)
    except zmq.Again:
        return None
    except zmq.ContextTerminated:
        raise Cancelled("the client was closed") from None
