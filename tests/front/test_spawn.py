"""What a worker is started with."""

from __future__ import annotations

from pathlib import Path

from kvd.front.spawn import WORKER, Spec
from kvd.home import Home
from kvd.worker.main import options

HOME = Home(Path("/h"))


def spec(**changes: object) -> Spec:
    given = {
        "run": 3, "name": "demo", "model": Path("/m"), "socket": Path("/s"), "store": Path("/st"), "kv": "k8v4",
        "block_size": 256, "chunk": None, "pool_limit": 10, "pool_initial": 5, "weights_limit": 7,
    }  # fmt: skip
    return Spec(**{**given, **changes})  # type: ignore[arg-type]


def test_the_worker_understands_its_command_line() -> None:
    for chunk in (None, 512):
        arguments = spec(chunk=chunk).arguments(HOME, 9)
        assert tuple(arguments[: len(WORKER)]) == WORKER
        read = options(arguments[len(WORKER) :])
        assert (read.connect, read.home, read.model, read.name) == (Path("/s"), Path("/h"), Path("/m"), "demo")
        assert (read.leash, read.chunk, read.kv, read.block_size) == (9, chunk, "k8v4", 256)
        assert (read.pool_limit, read.pool_initial, read.weights_limit) == (10, 5, 7)
