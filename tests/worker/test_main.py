"""The worker as a process, against a socket that stands for the front."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvclient.errors import BadRequest, UnsupportedModel, from_wire
from kvclient.wire import Message, message, parse
from kvd.leash import ORPHANED
from kvd.messages import Cancel, LookedUp, Lookup, Reserve, Reserved, Stop, Work, to_front
from tests.tiny import tiny_model

PATIENCE_MS = 60_000


class Front:
    """One worker process and its socket. Stores nothing: lookups find nothing, reservations are refused."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.bind(f"ipc://{folder}/s")
        reading, self.leash = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvd.worker.main", "--connect", f"{folder}/s", "--home", folder,
             "--model", model, "--name", "tiny", "--store", folder / "store", "--leash", str(reading),
             "--block-size", "16", "--pool-limit", str(1 << 24), "--pool-initial", str(1 << 20)],
            pass_fds=(reading,), env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        os.close(reading)

    def send(self, one: Any) -> None:
        self.socket.send_multipart(one.encode().frames())

    def work(self, kind: str, id: str, **body: Any) -> None:
        self.send(Work(kind, id, message(kind, id, body).packed))

    def next(self, *kinds: str) -> Message:
        """The next message of one of these kinds; questions about the store are answered on the way."""
        while self.socket.poll(PATIENCE_MS):
            received = parse(self.socket.recv_multipart())
            if received.kind in ("lookup", "reserve"):
                match to_front(received):
                    case Lookup(q):
                        self.send(LookedUp(q, (), None, 0))
                    case Reserve(q):
                        self.send(Reserved(q, False, reason="no_store"))
            if received.kind in kinds:
                return received
        raise AssertionError(f"no {kinds}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.leash)
        self.context.destroy(linger=0)


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="kvd", dir="/tmp"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def front(folder: Path) -> Iterator[Front]:
    front = Front(folder, tiny_model(folder / "model"))
    yield front
    front.close()


def test_a_worker_serves_beats_cancels_and_stops(front: Front) -> None:
    info = front.next("ready").body["info"]
    assert info["architecture"] == "llama"
    assert {"weights_bytes", "pool_bytes", "pool_limit_bytes", "kv_precision", "blocks_total", "waiting"} <= info.keys()

    front.work("count", "c", prompt="people")
    assert front.next("result").body["tokens"] > 0
    front.work("generate", "g", prompt="people know", max_tokens=5, temperature=0.0)
    done = front.next("done").body
    assert done["choices"][0]["text"]
    assert done["stats"]["stored_tokens"] == 0
    front.work("generate", "b", prompt="x", nonsense=1)
    assert isinstance(from_wire(front.next("error").body), BadRequest)

    front.work("generate", "long", prompt="people", max_tokens=4000, logit_bias={"2": -100})
    front.next("text")
    front.send(Cancel("long", "asked"))
    assert front.next("done").body["choices"][0]["finish_reason"] == "cancelled"
    assert front.next("beat").body["phase"] in ("idle", "decode")
    front.send(Stop(0.0))
    assert front.process.wait(30) == 0


def test_a_stop_ends_what_runs_with_a_terminal_event(front: Front) -> None:
    front.next("ready")
    front.work("generate", "long", prompt="people", max_tokens=4000, logit_bias={"2": -100})
    front.next("text")
    front.send(Stop(0.0))
    assert front.next("error", "done").id == "long"
    assert front.process.wait(30) == 0


def test_a_stop_with_time_lets_the_answer_end(front: Front) -> None:
    front.next("ready")
    front.work("generate", "g", prompt="people", max_tokens=50, logit_bias={"2": -100})
    front.next("text")
    front.send(Stop(30.0))
    assert front.next("error", "done").body["choices"][0]["finish_reason"] == "length"
    assert front.process.wait(30) == 0


def test_a_worker_ends_with_its_front(front: Front) -> None:
    front.next("ready")
    os.close(front.leash)
    assert front.process.wait(10) == ORPHANED
    front.leash = os.open(os.devnull, os.O_RDONLY)


def test_an_interrupt_from_the_terminal_is_for_the_front(front: Front) -> None:
    front.next("ready")
    front.process.send_signal(signal.SIGINT)
    front.work("count", "c", prompt="people")
    assert front.next("result").body["tokens"] > 0


def test_a_model_that_cannot_be_served_is_told_by_name(folder: Path) -> None:
    model = tiny_model(folder / "model", config={"model_type": "mamba"})
    front = Front(folder, model)
    problem = from_wire(front.next("failed").body["error"])
    assert isinstance(problem, UnsupportedModel)
    assert "mamba" in problem.message
    assert front.process.wait(30) == 1
    front.close()
