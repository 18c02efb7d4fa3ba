"""A worker without MLX for the front's tests: it does what the prompt says.

    say N            N text events, then done          hold          no event until cancelled
    slow N SECONDS   the same with pauses              abort         die by SIGABRT
    mute             no event at all until cancelled
    deaf             no event, cancelled or not
    flood N SIZE     N texts of SIZE characters        stuck         beat as if one step never ended
    die              die before any event
    exit STATUS      leave without a word              stop          SIGSTOP oneself
    grow N           ask for N bytes more, say what came back
    need N           the same as something live cannot go on without, again while it is coming
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import zmq

from kvclient import wire
from kvclient.errors import BadRequest, OutOfMemory
from kvd import leash
from kvd.messages import Beat, Cancel, Clear, Cleared, Failed, Granted, Grow, Ready, Stop, Work, to_worker


class FakeWorker:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.phase, self.at, self.expected = "loading", time.monotonic(), 0.1
        self.live: dict[str, threading.Event] = {}
        self.granted: queue.SimpleQueue[Granted] = queue.SimpleQueue()
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.SNDHWM, 200)
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.connect(f"ipc://{args.connect}")
        self.out: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self.out.bind("inproc://out")
        self.local = threading.local()

    def emit(self, message: wire.Message) -> None:
        """From any thread."""
        if not hasattr(self.local, "push"):
            self.local.push = zmq.Context.instance().socket(zmq.PUSH)
            self.local.push.connect("inproc://out")
        self.local.push.send_multipart(message.frames())

    def event(self, kind: str, id: str, **body: Any) -> None:
        self.emit(wire.message(kind, id, body))

    def beats(self) -> None:
        while True:
            since = time.monotonic() - self.at if self.phase != "idle" else 0.0
            self.emit(Beat(self.phase, since, self.expected, {"pool_bytes": 1000, "live": len(self.live)}).encode())
            time.sleep(0.5)

    def run(self) -> None:
        threading.Thread(target=self.beats, daemon=True).start()
        self.load()
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.out, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self.out in ready:
                self.socket.send_multipart(self.out.recv_multipart())
            if self.socket in ready:
                self.received(to_worker(wire.parse(self.socket.recv_multipart())))

    def load(self) -> None:
        how = (Path(self.args.model) / "how").read_text().split() if (Path(self.args.model) / "how").exists() else []
        match how:
            case ["crash"]:
                print("crashed while loading", file=sys.stderr, flush=True)
                os.abort()
            case ["held"]:
                threading.Thread(target=self.load_held).start()
            case ["compiles", seconds]:
                self.expected = float(seconds)
                threading.Timer(float(seconds), self.loaded).start()
            case ["slow", seconds]:
                threading.Timer(float(seconds), self.loaded).start()
            case ["refuse"]:
                self.emit(Failed.of(OutOfMemory("too big", needed=2, available=1)).encode())
            case _ if self.args.kv == "k2v2":
                self.emit(Failed.of(BadRequest("K in groups of 32: the head size 80 is not a multiple")).encode())
            case _:
                self.loaded()

    def load_held(self) -> None:
        wait_without(Path(self.args.model) / "hold-load")
        self.loaded()

    def loaded(self) -> None:
        self.phase = "idle"
        kv = "native" if self.args.kv == "auto" else self.args.kv
        layers = ";".join(["1x64/64:native,native"] * 4)
        info = {"weights_bytes": 4000, "pool_bytes": 1000, "kv_precision": kv, "kv_layout": f"kv1|float32|{layers}"}
        given = {"block_size": int(self.args.block_size), "pool_limit": self.args.pool_limit}
        self.emit(Ready({**info, **given}).encode())

    def received(self, message: Any) -> None:
        match message:
            case Work():
                self.live[message.id] = threading.Event()
                threading.Thread(target=self.work, args=(message,), daemon=True).start()
            case Cancel():
                if message.id in self.live:
                    self.live[message.id].set()
            case Clear():
                self.emit(Cleared(message.q, 5, 500 if not message.namespaces else 50, len(self.live)).encode())
            case Granted():
                self.granted.put(message)
            case Stop():
                threading.Thread(target=self.stop, args=(message.drain_s,), daemon=True).start()

    def stop(self, drain_s: float) -> None:
        until = time.monotonic() + drain_s
        while self.live and time.monotonic() < until:
            time.sleep(0.01)
        for cancelled in list(self.live.values()):
            cancelled.set()
        while self.live:
            time.sleep(0.01)
        time.sleep(0.1)
        wait_without(Path(self.args.model) / "hold-stop")
        os._exit(0)

    def work(self, work: Work) -> None:
        body = wire.unpack(work.packed)
        words = str(body.get("prompt", "say 1")).split()
        text = ""
        match words:
            case ["abort" | "exit" | "stop" | "stuck" | "hold", *_]:
                self.event("progress", work.id, done=1, total=2, cached=0)
                time.sleep(0.1)
        match words:
            case ["abort"] | ["die"]:
                os.abort()
            case ["exit", status]:
                os._exit(int(status))
            case ["stop"]:
                os.kill(os.getpid(), signal.SIGSTOP)
            case ["stuck"]:
                self.phase, self.at = "decode", time.monotonic()
                time.sleep(1000)
            case ["mute"]:
                self.live[work.id].wait()
            case ["deaf"]:
                time.sleep(1000)
            case ["hold"]:
                self.live[work.id].wait()
            case ["say", n]:
                text = self.say(work.id, int(n), 1, 0.0)
            case ["slow", n, pause]:
                text = self.say(work.id, int(n), 1, float(pause))
            case ["flood", n, size]:
                text = self.say(work.id, int(n), int(size), 0.0)
            case ["grow", n]:
                text = str(self.grow(int(n)))
            case ["need", n]:
                text = str(self.grow(int(n), needed=True))
            case ["size", *_]:
                text = str(len(work.packed))
        self.end(work, text)

    def grow(self, nbytes: int, needed: bool = False) -> tuple[bool, int]:
        while True:
            self.emit(Grow(1, nbytes, needed).encode())
            if nbytes < 0:
                return True, 0
            answer = self.granted.get(timeout=10)
            if not answer.coming:
                return answer.ok, answer.available
            time.sleep(0.01)

    def say(self, id: str, n: int, size: int, pause: float) -> str:
        for i in range(n):
            if self.live[id].is_set():
                return ""
            self.event("text", id, text=str(i % 10) * size, index=0)
            if pause:
                self.live[id].wait(pause)
        return "" if n * size > 10_000 else "".join(str(i % 10) * size for i in range(n))

    def end(self, work: Work, text: str) -> None:
        cancelled = self.live.pop(work.id).is_set()
        if work.kind != "generate":
            self.event("result", work.id, tokens=3)
            return
        choice = {"index": 0, "text": text, "finish_reason": "cancelled" if cancelled else "stop"}
        stats = {"prompt_tokens": 2, "computed_tokens": 2, "completion_tokens": len(text), "pid": os.getpid(),
                 "kv_bytes": 5, "kv_precision": self.args.kv, "peak_memory_bytes": 9}  # fmt: skip
        self.event("done", work.id, choices=[choice], stats=stats)


def wait_without(path: Path) -> None:
    while path.exists():
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("connect", "home", "model", "name", "store", "kv", "block-size", "chunk"):
        parser.add_argument(f"--{name}")
    for name in ("leash", "pool-limit", "pool-initial", "weights-limit"):
        parser.add_argument(f"--{name}", type=int)
    args = parser.parse_args()
    leash.hold(args.leash)
    FakeWorker(args).run()


if __name__ == "__main__":
    main()
