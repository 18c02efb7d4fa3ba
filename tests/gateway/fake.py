"""A daemon that speaks the wire protocol and nothing else: a ROUTER pair in a thread, answering from a script."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import zmq

from kvclient import wire
from kvclient.errors import Cancelled, KvdError, UnknownModel
from kvclient.paths import control_path

Step = tuple[str, dict[str, Any]] | KvdError | threading.Event
"""An event (kind, body); an error that ends the request; or an event that is waited for."""
Script = Callable[[dict[str, Any], str], Iterable[Step]]

STATS: dict[str, Any] = {
    "prompt_tokens": 40, "cached_tokens": 30, "cached_memory_tokens": 20, "cached_ssd_tokens": 10,
    "computed_tokens": 10, "completion_tokens": 3, "stored_tokens": 42, "queue_s": 0.001,
    "prefill_s": 0.2, "ttft_s": 0.3, "decode_tokens_per_s": 20.0, "kv_bytes": 1000,
    "first_divergence": {"token": 30, "text": "b", "stored_text": "a"},
    "miss_reason": None, "peak_memory_bytes": 5, "recomputed_tokens": 0, "kv_precision": "native", "load_s": 0.0,
    "out_of_memory": None,
}  # fmt: skip
STATUS: dict[str, Any] = {
    "version": "0.1.0", "pid": 1, "requests": [], "models": [],
    "metrics": [
        {"name": "kvd_prompt_tokens_total", "label": "source", "help": "by source",
         "values": {"cached_memory": 20, "cached_ssd": 10, "computed": 10}},
        {"name": "kvd_cache_misses_total", "label": "reason", "help": "by reason", "values": {"not_stored": 2}},
        {"name": "kvd_completion_tokens_total", "label": "", "help": "generated", "values": {"": 3}},
    ],
}  # fmt: skip
MODELS = [
    {"name": "demo", "pulled_at": 1_700_000_000.0, "state": "loaded", "context_length": 8192, "pid": 7,
     "log": "/home/me/logs/worker.log", "fingerprint": "abc", "source": "/home/me/demo"},
    {"name": "other", "pulled_at": 0, "state": "not loaded", "context_length": None},
]  # fmt: skip


def done(text: str, reason: str = "stop", **more: Any) -> tuple[str, dict[str, Any]]:
    stats = {**STATS, **more.pop("stats", {})}
    return "done", {"choices": [{"index": 0, "text": text, "finish_reason": reason, **more}], "stats": stats}


def speak(*words: str, reason: str = "stop") -> Iterator[Step]:
    """A usual answer: waiting, prefill, words, the end."""
    yield "queued", {"position": 0}
    yield "progress", {"done": 30, "total": 40, "cached": 30}
    for word in words:
        yield "text", {"text": word, "index": 0}
    yield "finish", {"index": 0, "finish_reason": reason}
    yield done("".join(words), reason)


def unknown(model: str) -> UnknownModel:
    return UnknownModel(f"there is no model {model!r}", model=model, known=["demo"])


def default_script(body: dict[str, Any], model: str) -> Iterable[Step]:
    if model not in ("demo", ""):
        return [unknown(model)]
    return speak("Hel", "lo", " there")


class FakeDaemon:
    """`verbs` is all it was asked, `asked` the generate bodies in their order, `cancelled` the ids of cancels. Used as
    a context manager."""

    def __init__(self, script: Script = default_script) -> None:
        self.script = script
        self.asked: list[dict[str, Any]] = []
        self.verbs: list[str] = []
        self.cancelled: list[str] = []
        self.cancel_seen = threading.Event()
        self.status = dict(STATUS)
        self.models = MODELS
        self.default = "demo"
        self.folder = Path(tempfile.mkdtemp(prefix="kvd", dir="/tmp"))
        self.socket = self.folder / "s"
        self._stop = threading.Event()
        self._live: dict[str, tuple[bytes, Iterator[Step], threading.Event | None]] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._ready = threading.Event()

    def __enter__(self) -> FakeDaemon:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def stop(self) -> None:
        """Goes away without a word."""
        self._stop.set()
        self._thread.join(10)

    def __exit__(self, *exc: object) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.ROUTER) as control:
            for socket, path in ((router, self.socket), (control, control_path(self.socket))):
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.SNDHWM, 0)
                socket.setsockopt(zmq.BACKLOG, 1024)  # a test's many streams connect at once
                socket.bind(f"ipc://{path}")
            self._ready.set()
            poller = zmq.Poller()
            poller.register(router, zmq.POLLIN)
            poller.register(control, zmq.POLLIN)
            while not self._stop.is_set():
                moved = self._advance(router)
                for socket, _ in poller.poll(0 if moved else 2 if self._live else 20):
                    identity, *frames = socket.recv_multipart()
                    self._received(socket, identity, wire.parse(frames))

    def _received(self, socket: zmq.Socket[bytes], identity: bytes, message: wire.Message) -> None:
        body = message.body
        self.verbs.append(message.kind)
        if message.kind == "generate":
            self.asked.append(body)
            self._live[message.id] = identity, iter(self.script(body, message.model)), None
            return
        if message.kind == "cancel":
            self.cancelled.append(body["id"])
            self._live.pop(body["id"], None)
            self.cancel_seen.set()
        if message.kind == "models" and (name := body.get("model")) is not None:
            name = name or self.default
            found = [model for model in self.models if name in (model["name"], *model.get("aliases", ()))]
            answer = ("result", {"models": found}) if found else ("error", unknown(name).to_wire())
            self._send(socket, identity, wire.message(answer[0], message.id, answer[1]))
            return
        answers: dict[str, dict[str, Any]] = {
            "status": self.status, "models": {"models": self.models}, "count": {"tokens": 17},
            "cancel": {"cancelled": True},
        }  # fmt: skip
        if message.kind == "count":
            self.asked.append(body)
        self._send(socket, identity, wire.message("result", message.id, answers.get(message.kind, {})))

    def _advance(self, router: zmq.Socket[bytes]) -> bool:
        """One step of every live request. False when all wait."""
        moved = False
        for id, (identity, steps, held) in list(self._live.items()):
            if held is not None and not held.is_set():
                continue
            step = next(steps, Cancelled("the script has ended"))
            moved = True
            if isinstance(step, threading.Event):
                self._live[id] = identity, steps, step
                continue
            self._live[id] = identity, steps, None
            kind, body = ("error", step.to_wire()) if isinstance(step, KvdError) else step
            if kind in wire.TERMINAL:
                del self._live[id]
            self._send(router, identity, wire.message(kind, id, body))
        return moved

    def _send(self, socket: zmq.Socket[bytes], identity: bytes, message: wire.Message) -> None:
        socket.send_multipart([identity, *message.frames()])


def words(count: int) -> Iterator[str]:
    return itertools.islice(itertools.cycle(("one ", "two ", "three ")), count)
