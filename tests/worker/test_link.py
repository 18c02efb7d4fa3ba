"""The socket's thread: everything in order, text merged while the front does not read, nonsense survived."""

from __future__ import annotations

import queue
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvclient.wire import parse
from kvd.messages import Cancel, Stop
from kvd.worker.link import HIGH_WATER, Link
from kvd.worker.outbox import Outbox

PATIENCE_MS = 20_000


class End:
    """The front's end, and a link that connects to it."""

    def __init__(self, folder: Path) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.set(zmq.RCVHWM, 10)
        self.socket.bind(f"ipc://{folder}/s")
        self.received: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.outbox = Outbox()
        self.link = Link(f"ipc://{folder}/s", self.outbox, self.received.put)
        self.link.start()

    def next(self) -> tuple[str, dict[str, Any]]:
        assert self.socket.poll(PATIENCE_MS)
        message = parse(self.socket.recv_multipart())
        return message.kind, message.body


@pytest.fixture
def end() -> Iterator[End]:
    folder = Path(tempfile.mkdtemp(prefix="kvd", dir="/tmp"))
    end = End(folder)
    yield end
    end.link.close(5.0)
    end.context.destroy(linger=0)
    shutil.rmtree(folder)


def test_messages_go_both_ways_in_order(end: End) -> None:
    for n in range(50):
        end.outbox.event("progress", f"r{n}", {"done": n, "total": 50, "cached": 0})
    assert [end.next()[1]["done"] for _ in range(50)] == list(range(50))
    for n in range(50):
        end.socket.send_multipart(Cancel(f"r{n}", "asked").encode().frames())
    assert [end.received.get(timeout=20).id for _ in range(50)] == [f"r{n}" for n in range(50)]


def test_text_is_merged_while_the_front_does_not_read(end: End) -> None:
    words = [f"{n} " for n in range(20_000)]
    for word in words:
        end.outbox.event("text", "a", {"index": 0, "text": word})
    end.outbox.event("done", "a", {})
    assert len(end.outbox) <= 2
    got, messages = "", 0
    while True:
        kind, body = end.next()
        if kind == "done":
            break
        got += body["text"]
        messages += 1
    assert got == "".join(words)
    assert messages <= 10 * HIGH_WATER


def test_nonsense_from_the_socket_is_logged_and_survived(end: End) -> None:
    for frames in ([b"x"], [b"\x80", b"\x80", b"\x80"], [b"\xc1", b""]):
        end.socket.send_multipart(frames)
    end.socket.send_multipart(Stop(1.0).encode().frames())
    assert end.received.get(timeout=20) == Stop(1.0)


def test_closing_sends_what_is_left(end: End) -> None:
    for n in range(5):
        end.outbox.event("progress", f"r{n}", {"done": n, "total": 1, "cached": 0})
    end.link.close(10.0)
    assert [end.next()[1]["done"] for _ in range(5)] == list(range(5))
