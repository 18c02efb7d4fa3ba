"""The sockets of one request in flight, non-blocking: whoever waits, waits on the descriptors of `sockets`.

Each request has its own DEALER, so that nothing is shared between threads, a slow reader slows only itself, and a
client that goes away is seen by the daemon as a lost peer.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq

from kvclient.core import Reply, Request, Watch, received, request
from kvclient.errors import Busy, Cancelled, KvdError, Unreachable
from kvclient.events import Event
from kvclient.hub import BROKEN, CANCEL_LINGER_MS, LOST, Hub, Socket, address, probe
from kvclient.paths import control_path


class Exchange:
    """One request and its replies. Used by one thread at a time; `lock` is held while it is.

    Making one sends the request. Raises Unreachable if no daemon listens, Busy, or Cancelled for a closed client."""

    def __init__(self, hub: Hub, asked: Request) -> None:
        self.request, self.reply = asked, Reply(asked)
        self.lock = threading.Lock()
        self.on_close: Callable[[], None] | None = None
        self._hub = hub
        self._target = target = control_path(hub.path) if asked.control else hub.path
        probe(target, hub.path)
        self._pings: Socket | None = None
        self._ready: deque[Event] = deque()
        self._failure: KvdError | None = None
        self._closed = False
        self._dead = False
        self._watch = Watch(asked, str(hub.path), time.monotonic())
        self._socket, self._monitor = hub.watched(CANCEL_LINGER_MS if asked.control else 0)
        hub.add(self)
        try:
            self._socket.connect(address(target))
            self._socket.send_multipart(asked.message.frames(), zmq.DONTWAIT)
        except zmq.ContextTerminated:
            self.close()
            raise Cancelled("the client was closed") from None

    @property
    def sockets(self) -> list[Socket]:
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
                self._dead = isinstance(problem, (Unreachable, Busy))

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
        with suppress(zmq.ContextTerminated):
            self._socket.disable_monitor()  # an event that nobody can take would block ZeroMQ's own thread for ever
        for one in self.sockets:
            one.close()
        if wanted:
            self._hub.cancel(self.request.id)

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
            self._gone(lost)
        while self._pings is not None and _receive(self._pings) is not None:
            self._watch.pong(now)
        if self._watch.due(now):
            self._ping()

    def _lost(self) -> int:
        """Events of the connection's end, 0 for none. Asked before the messages are read, so that what came before the
        loss is still found."""
        lost = 0
        while (frames := _receive(self._monitor)) is not None:
            event: int = struct.unpack_from("=H", frames[0])[0]
            lost |= event & LOST
        return lost

    def _gone(self, lost: int) -> None:
        if self.request.verb == "shutdown":
            self.reply.open = False
            return
        if not lost & BROKEN:  # it was never made, so nothing was sent
            probe(self._target, self._hub.path)
            raise Busy(f"the daemon at {self._hub.path} took no connection: its queue was full",
                       socket=str(self._hub.path))  # fmt: skip
        raise Unreachable(
            f"the daemon at {self._hub.path} went away before the request was done", socket=str(self._hub.path)
        )

    def _ping(self) -> None:
        if self._pings is None:
            self._pings = self._hub.dealer(0)
            self._pings.connect(address(control_path(self._hub.path)))
        try:
            self._pings.send_multipart(request("ping", {}).message.frames(), zmq.DONTWAIT)
        except zmq.Again:
            return


def _receive(source: Socket) -> list[bytes] | None:
    try:
        return source.recv_multipart(zmq.DONTWAIT)
    except zmq.Again:
        return None
    except zmq.ContextTerminated:
        raise Cancelled("the client was closed") from None
