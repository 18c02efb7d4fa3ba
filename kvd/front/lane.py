"""A ZeroMQ socket on the asyncio loop, without blocking and without an await: receiving calls back, sending answers.

ZeroMQ signals its descriptor on edges only, so after every receive and send the socket is asked whether more is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum

import zmq

Frames = list[bytes]
BURST = 64
"""messages taken before the loop gets its turn again"""


class Sent(Enum):
    OK = "ok"
    FULL = "full"
    """the peer's high-water mark is reached, or no peer is connected yet"""
    GONE = "gone"
    """a ROUTER knows no such peer (any more)"""


class Lane:
    """Owned by the loop's thread. `on_frames` is called with each message."""

    def __init__(
        self, socket: zmq.Socket[bytes], on_frames: Callable[[Frames], None],
        on_writable: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self._socket = socket
        self._on_frames = on_frames
        self._on_writable = on_writable
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._again = False
        self._closed = False
        self._loop.add_reader(self._fd, self._wake)
        self._schedule()

    def send(self, frames: Frames) -> Sent:
        if self._closed:
            return Sent.GONE
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=True)
            return Sent.OK
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError as problem:
            if problem.errno != zmq.EHOSTUNREACH:
                raise
            return Sent.GONE
        finally:
            self._schedule()

    def close(self, linger_ms: int = 0) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            self._socket.close(linger_ms)

    def _schedule(self) -> None:
        if not self._again and not self._closed:
            self._again = True
            self._loop.call_soon(self._wake)

    def _wake(self) -> None:
        self._again = False
        for _ in range(BURST):
            if self._closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                self._on_frames(frames)
            except BaseException:
                self._schedule()  # the messages behind this one would lie there unread
                raise
        else:
            self._schedule()
            return
        if not self._closed and self._on_writable is not None:
            self._look_for_room(self._on_writable)

    def _look_for_room(self, on_writable: Callable[[], None]) -> None:
        """Asking takes the edge away: what came in meanwhile would lie there unread, so it is asked for as well."""
        events = int(self._socket.getsockopt(zmq.EVENTS))
        if events & zmq.POLLIN:
            self._schedule()
        if events & zmq.POLLOUT:
            on_writable()
