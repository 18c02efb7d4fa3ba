"""The two sockets clients talk to: requests on one, control (cancel, status, shutdown, ping) on the other, so that
control is never queued behind a long prompt. Knows frames and peers, nothing of what they ask."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import zmq

from kvclient import paths, wire
from kvclient.errors import KvdError, ProtocolError
from kvclient.wire import Message
from kvd.front import outbox
from kvd.front.gate import AWAY, Gate
from kvd.front.lane import Frames, Lane, Sent
from kvd.front.metrics import Count, Metrics
from kvd.front.outbox import Outbox

RETRY_S, RETRY_MOST_S = 0.05, 1.0
"""A ROUTER does not say when a peer has room again: how long to wait before trying, doubled while nothing moves."""
BACKLOG_MOST = 64 * 1024 * 1024
"""bytes kept for all slow clients together"""
CONTROL_MAX = 1024 * 1024
"""bytes per frame on the control lane"""
HIGH_WATER = 256
"""messages queued per client inside ZeroMQ"""
HANDSHAKE_MS = 3000
CONNECTIONS = 1024
"""descriptors in use at which the request socket takes no more connections; the control socket a quarter more. Far
below the limit: libzmq accepts many before a busy loop gets its turn"""


@dataclass(frozen=True, slots=True)
class Peer:
    """A connected client, as one lane knows it."""

    control: bool
    identity: bytes


class Server:
    """Owned by the loop's thread. `on_message(peer, message)` gets every well-formed message; `on_gone(peer, reason)`
    is called when a peer is found dead, or unable to take what it asked for."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], path: Path, descriptors: int,
        on_message: Callable[[Peer, Message], None], on_gone: Callable[[Peer, str], None], metrics: Metrics,
    ) -> None:  # fmt: skip
        self._on_message, self._on_gone, self._metrics = on_message, on_gone, metrics
        self._outboxes: dict[Peer, Outbox] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._pause = RETRY_S
        self._lanes: dict[bool, Lane] = {}
        self._gates: list[Gate] = []
        self.paths = {False: path, True: paths.control_path(path)}
        most = min(CONNECTIONS, descriptors // 4)
        for control, name in ((False, "requests"), (True, "control")):
            place = self.paths[control]
            place.with_name(place.name + AWAY).unlink(missing_ok=True)
            socket = _bind(context, place, CONTROL_MAX if control else wire.MAX_BODY)
            self._lanes[control] = Lane(socket, partial(self._received, control))
            shut = partial(metrics.add, Count.GATE, name)
            self._gates.append(Gate(socket, place, most + most // 4 * control, shut))

    def send(self, peer: Peer, message: Message) -> None:
        """Never blocks and never fails: what a slow client cannot take waits, merged, up to outbox.LIMIT."""
        waiting = self._outboxes.get(peer)
        if waiting is not None:
            self._queue(peer, waiting, message)
            return
        sent = self._lanes[peer.control].send([peer.identity, *message.frames()])
        if sent is Sent.GONE:
            self._gone(peer)
        elif sent is Sent.FULL:
            self._metrics.add(Count.SLOW, "waiting")
            self._queue(peer, self._outboxes.setdefault(peer, Outbox()), message)

    def forward(self, peer: Peer, header: bytes, packed: bytes, message: Message) -> None:
        """Like `send`, with the frames as they came from a worker."""
        if peer in self._outboxes or self._lanes[peer.control].send([peer.identity, header, packed]) is not Sent.OK:
            self.send(peer, message)

    @property
    def backlog(self) -> int:
        """Bytes that slow clients have not taken."""
        return sum(box.size for box in self._outboxes.values())

    @property
    def gated(self) -> bool:
        return any(gate.shut for gate in self._gates)

    def close(self, linger_ms: int) -> None:
        """Stop listening; what clients are still owed has `linger_ms` to go out."""
        if self._timer is not None:
            self._timer.cancel()
        for gate in self._gates:
            gate.close()
        for control, lane in self._lanes.items():
            lane.close(linger_ms)
            with suppress(FileNotFoundError):
                self.paths[control].unlink()

    def _received(self, control: bool, frames: Frames) -> None:
        peer = Peer(control, frames[0])
        try:
            message = wire.parse(frames[1:])
        except ProtocolError as problem:
            self._refuse(peer, problem)
            return
        self._on_message(peer, message)

    def _refuse(self, peer: Peer, problem: ProtocolError) -> None:
        """Garbage is dropped; what carries a request id is answered, also in another version of the protocol."""
        id = problem.details.get("id")
        self._metrics.add(Count.PROTOCOL, "version" if "ours" in problem.details else "malformed")
        if isinstance(id, str):
            self.send(peer, error(id, problem))

    def _queue(self, peer: Peer, waiting: Outbox, message: Message) -> None:
        waiting.add(message)
        if waiting.size > outbox.LIMIT or self.backlog > BACKLOG_MOST:
            self._metrics.add(Count.SLOW, "given_up")
            waiting.clear()
            self._on_gone(peer, "slow reader")
        if self._timer is None:
            self._pause = RETRY_S
            self._timer = asyncio.get_running_loop().call_later(self._pause, self._flush)

    def _flush(self) -> None:
        self._timer = None
        moved = [self._drain(peer, waiting) for peer, waiting in list(self._outboxes.items())]
        if self._outboxes and self._timer is None:
            self._pause = RETRY_S if any(moved) else min(2 * self._pause, RETRY_MOST_S)
            self._timer = asyncio.get_running_loop().call_later(self._pause, self._flush)

    def _drain(self, peer: Peer, waiting: Outbox) -> bool:
        """Send what the peer takes now; True when it took anything."""
        before, sent = len(waiting), Sent.OK
        while waiting and sent is Sent.OK:
            sent = self._lanes[peer.control].send([peer.identity, *waiting.peek().frames()])
            if sent is Sent.OK:
                waiting.pop()
        left = len(waiting)
        if sent is Sent.GONE:
            self._gone(peer)
        elif not waiting:
            del self._outboxes[peer]
        return left < before

    def _gone(self, peer: Peer) -> None:
        self._outboxes.pop(peer, None)
        self._metrics.add(Count.CLIENTS_GONE)
        self._on_gone(peer, "client gone")


def error(id: str, problem: KvdError) -> Message:
    return wire.message("error", id, problem.to_wire())


def _bind(context: zmq.Context[zmq.Socket[bytes]], path: Path, most: int) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, most)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.BACKLOG, 64)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(f"ipc://{path}")
    return socket
