"""A daemon in its own process, and clients that speak frames."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from kvclient import paths, wire
from kvclient.wire import Message

PATIENCE_S = 20.0


def until(true: Callable[[], Any], what: str, seconds: float = PATIENCE_S) -> Any:
    """Wait for a condition that no event announces."""
    end = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.01)
    return value


@dataclass
class Client:
    """One DEALER; `ask` sends, `next` receives one message, `result` skips to the terminal one."""

    path: Path
    socket: zmq.Socket[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(f"ipc://{self.path}")

    def ask(self, kind: str, body: dict[str, Any] | None = None, model: str = "", id: str | None = None) -> str:
        message = wire.message(kind, id or wire.new_id(), body or {}, model)
        self.socket.send_multipart(message.frames())
        return message.id

    def next(self, seconds: float = PATIENCE_S) -> Message:
        assert self.socket.poll(int(seconds * 1000)), f"no message within {seconds} s"
        return wire.parse(self.socket.recv_multipart())

    def events(self, id: str, seconds: float = PATIENCE_S) -> Iterator[Message]:
        """Up to and with the terminal one."""
        end = time.monotonic() + seconds
        while True:
            message = self.next(max(0.0, end - time.monotonic()))
            if message.id == id:
                yield message
                if message.kind in wire.TERMINAL:
                    return

    def result(self, id: str, seconds: float = PATIENCE_S) -> Message:
        return list(self.events(id, seconds))[-1]

    def results(self, ids: set[str], seconds: float = PATIENCE_S) -> dict[str, Message]:
        """The terminal messages of several requests."""
        found: dict[str, Message] = {}
        end = time.monotonic() + seconds
        while ids - found.keys():
            message = self.next(max(0.0, end - time.monotonic()))
            if message.kind in wire.TERMINAL:
                found[message.id] = message
        return found

    def call(self, kind: str, body: dict[str, Any] | None = None, model: str = "") -> dict[str, Any]:
        message = self.result(self.ask(kind, body, model))
        assert message.kind != "error", message.body
        return message.body

    def wait_for(self, id: str, kind: str, seconds: float = PATIENCE_S) -> Message:
        for message in self.events(id, seconds):
            if message.kind == kind:
                return message
        raise AssertionError(f"ended without {kind}")

    def close(self) -> None:
        self.socket.close()


class Daemon:
    def __init__(self, *flags: str, models: tuple[str, ...] = ("demo",)) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="kvd", dir="/tmp"))
        self.flags = flags
        self.socket = self.home / "run" / "kvd.sock"
        self.process: subprocess.Popen[bytes]
        for name in models:
            self.add(name)

    def add(self, name: str, how: str = "", weights: int = 64) -> None:
        """A model folder; `how` tells the fake worker how to load."""
        folder = self.home / "models" / name
        folder.mkdir(parents=True)
        record = {"name": name, "source": "test", "pulled_at": 0.0}
        (folder / "kvd.json").write_text(json.dumps(record))
        config = {"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 4, "model_type": "llama"}
        (folder / "config.json").write_text(json.dumps(config))
        header = json.dumps({"w": {"dtype": "F32", "shape": [weights // 4], "data_offsets": [0, weights]}}).encode()
        with (folder / "model.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(8 + len(header) + weights)
        if how:
            (folder / "how").write_text(how)

    def start(self, limits: Callable[[], None] | None = None) -> None:
        self.log = (self.home / "stderr").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.front.serve", str(self.home), *self.flags],
            stderr=self.log, env={**os.environ, "KVD_HOME": str(self.home)}, preexec_fn=limits,
        )  # fmt: skip
        with self.control() as client:
            id = client.ask("ping")
            until(lambda: client.socket.poll(10) or self.process.poll() is not None, "the first answer", 60)
            assert self.process.poll() is None, (self.home / "stderr").read_text()
            client.result(id)

    @contextmanager
    def control(self) -> Iterator[Client]:
        client = Client(paths.control_path(self.socket))
        yield client
        client.close()

    @contextmanager
    def client(self) -> Iterator[Client]:
        client = Client(self.socket)
        yield client
        client.close()

    def status(self) -> dict[str, Any]:
        with self.control() as client:
            return client.call("status")

    def model(self, name: str = "demo") -> dict[str, Any]:
        return next(m for m in self.status()["models"] if m["name"] == name)

    def count(self, metric: str, label: str = "") -> int:
        rows = {row["name"]: row["values"] for row in self.status()["metrics"]}
        return int(rows.get(metric, {}).get(label, 0))

    def logs(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.home / "logs" / "kvd.log").read_text().splitlines()]

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(PATIENCE_S)
        self.log.close()
        return status

    def remove(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.home, ignore_errors=True)


@contextmanager
def daemon(
    *flags: str, models: tuple[str, ...] = ("demo",), limits: Callable[[], None] | None = None
) -> Iterator[Daemon]:
    made = Daemon(*flags, models=models)
    try:
        made.start(limits)
        yield made
        assert not [line for line in made.logs() if line["event"] in ("unexpected", "verb failed", "store failed")]
    finally:
        made.remove()
