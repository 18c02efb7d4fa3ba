"""The worker's socket to the front: one thread, which packs and unpacks so that the engine's thread need not."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final

import structlog
import zmq

from kvclient.errors import ProtocolError
from kvclient.wire import MAX_BODY, Message, parse
from kvd.messages import ToWorker, to_worker
from kvd.worker.outbox import Outbox

HIGH_WATER: Final = 200
"""messages; beyond it they wait in the outbox, where text is merged"""
log = structlog.get_logger()


class Link:
    """Owns a DEALER. `receive` is called on the link's thread for every message and must not block."""

    def __init__(self, address: str, outbox: Outbox, receive: Callable[[ToWorker], None]) -> None:
        self._address = address
        self._outbox = outbox
        self._receive = receive
        self._context = zmq.Context()
        self._awake, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        os.set_blocking(self._awake, False)
        self._closing = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        outbox.wake = self._wake

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout: float) -> None:
        """Send what is in the outbox, for at most `timeout` seconds, and close."""
        self._closing.set()
        self._wake()
        self._ended.wait(timeout)

    def _wake(self) -> None:
        try:
            os.write(self._waker, b"!")
        except BlockingIOError:
            return  # the pipe is full of wake-ups: it will wake

    def _run(self) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.SNDHWM, HIGH_WATER)
        socket.set(zmq.RCVHWM, 0)
        socket.set(zmq.MAXMSGSIZE, MAX_BODY)
        socket.set(zmq.LINGER, 2000)
        socket.connect(self._address)
        poller = zmq.Poller()
        poller.register(self._awake, zmq.POLLIN)
        unsent: Message | None = None
        while True:
            unsent = self._send(socket, unsent)
            if self._closing.is_set() and unsent is None:
                break
            poller.register(socket, zmq.POLLIN | (zmq.POLLOUT if unsent else 0))
            ready = dict(poller.poll())
            if self._awake in ready:
                os.read(self._awake, 65536)
            if ready.get(socket, 0) & zmq.POLLIN:
                self._drain(socket)
        socket.close()
        self._context.term()
        self._ended.set()

    def _send(self, socket: zmq.Socket[bytes], unsent: Message | None) -> Message | None:
        """Send until nothing is left (None) or the front is behind (the message that waits)."""
        while (message := unsent or self._outbox.take()) is not None:
            unsent = None
            try:
                socket.send_multipart(message.frames(), zmq.NOBLOCK)
            except zmq.Again:
                return message
        return None

    def _drain(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._receive(to_worker(parse(frames)))
            except ProtocolError as problem:
                log.error("message from the front does not fit", problem=problem.message)
