"""A daemon of a few lines: two ROUTERs in a thread that speak `kvclient.wire` and do what a test tells them."""

from __future__ import annotations

import queue
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from kvclient import wire
from kvclient.paths import control_path
from kvclient.wire import Message

Send = Callable[..., None]
"""(kind, body) for the request at hand"""
Script = Callable[[Message, Send], None]

CHOICE = {"index": 0, "text": "Hello world", "finish_reason": "stop", "reasoning": "", "tool_calls": []}
STATS = {
    "prompt_tokens": 7, "cached_tokens": 6, "cached_memory_tokens": 6, "computed_tokens": 1, "completion_tokens": 2,
}  # fmt: skip


def answer(message: Message, send: Send) -> None:
    send("queued", {"position": 0})
    send("progress", {"done": 7, "total": 7, "cached": 6})
    send("text", {"text": "Hello", "index": 0})
    send("text", {"text": " world", "index": 0})
    send("finish", {"index": 0, "finish_reason": "stop"})
    send("done", {"choices": [CHOICE], "stats": STATS, "model": message.model or "tiny"})


def silent(message: Message, send: Send) -> None:
    """Takes a request and never says anything of it."""


def result(**body: Any) -> Script:
    return lambda message, send: send("result", body)


class FakeDaemon:
    """`scripts[verb]` runs on the daemon's thread for each request; every message is also put into `received`."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="kvd", dir="/tmp"))
        self.path = self.home / "run" / "kvd.sock"
        self.path.parent.mkdir()
        self.scripts: dict[str, Script] = {
            "generate": answer, "ping": result(), "cancel": result(cancelled=True), "status": result(up=True),
        }  # fmt: skip
        self.received: queue.Queue[Message] = queue.Queue()
        self.controlled: set[str] = set()
        """ids of requests that came over the control lane"""
        self._orders: queue.Queue[Callable[[], None]] = queue.Queue()
        self._stop = threading.Event()
        self._up = threading.Event()
        self._sends: dict[str, Send] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._up.wait(10)

    def tell(self, id: str, kind: str, body: dict[str, Any]) -> None:
        """A reply from outside a script."""
        self._orders.put(lambda: self._sends[id](kind, body))

    def settle(self) -> None:
        """Returns when everything told before has been sent."""
        sent = threading.Event()
        self._orders.put(sent.set)
        assert sent.wait(10)

    def next(self, verb: str) -> Message:
        """The next message of this verb; others are skipped."""
        while (message := self.received.get(timeout=10)).kind != verb:
            pass
        return message

    def die(self) -> None:
        self._stop.set()
        self._thread.join(10)

    def close(self) -> None:
        self.die()
        shutil.rmtree(self.home, ignore_errors=True)

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        lanes = []
        for path in (self.path, control_path(self.path)):
            lane = context.socket(zmq.ROUTER)
            lane.setsockopt(zmq.MAXMSGSIZE, wire.MAX_BODY)
            lane.setsockopt(zmq.SNDHWM, 0)
            lane.setsockopt(zmq.BACKLOG, 1000)  # a test's hundred tasks connect at once
            lane.bind(f"ipc://{path}")
            lanes.append(lane)
        self._up.set()
        while not self._stop.is_set():
            poller = zmq.Poller()
            for lane in lanes:
                poller.register(lane, zmq.POLLIN)
            for lane, _ in poller.poll(10):
                self._serve(lane, lane.recv_multipart(), lane is lanes[1])
            while not self._orders.empty():
                self._orders.get()()
        for path in (self.path, control_path(self.path)):
            path.unlink(missing_ok=True)
        context.destroy(linger=1000)

    def _serve(self, lane: zmq.Socket[bytes], frames: list[bytes], control: bool) -> None:
        message = wire.parse(frames[1:])
        if control:
            self.controlled.add(message.id)

        def send(kind: str, body: dict[str, Any], *, version: int = wire.VERSION, id: str = message.id) -> None:
            reply = Message(kind, id, wire.pack(body), version=version)
            lane.send_multipart([frames[0], *reply.frames()])

        self._sends[message.id] = send
        self.received.put(message)
        script = self.scripts.get(message.kind)
        if script is None:
            send("error", {"code": "bad_request", "message": f"unknown verb {message.kind}", "details": {}})
        else:
            script(message, send)


def started(daemon: FakeDaemon, kv: Any) -> Any:
    """A stream whose first event has come and whose next one never will."""
    daemon.scripts["generate"] = lambda message, send: send("queued", {"position": 0})
    stream = kv.stream("demo", "hi")
    assert next(stream).kind == "queued"
    return stream
