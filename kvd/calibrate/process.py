"""The parent's side of a calibration: what is ordered, the child process, its messages. No mlx."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvclient.errors import WorkerLost, from_wire
from kvd.calibrate.result import Calibration, Gate, loads
from kvd.childenv import environment, keep_kernels
from kvd.home import Home
from kvd.models import blas

CHILD = (sys.executable, "-P", "-m", "kvd.calibrate.child")


@dataclass(frozen=True, slots=True)
class Order:
    """What to calibrate. tokens, window: None for the machine's defaults. memory: most bytes, None for no limit.
    kept: folder of a result whose measurements are taken over if they are of the same kind."""

    name: str
    folder: Path
    identity: str
    presets: tuple[str, ...]
    gate: Gate
    block_size: int
    memory: int | None = None
    tokens: int | None = None
    window: int | None = None
    budget: int | None = None
    text: Path | None = None
    kept: Path | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)


def order_of(text: str) -> Order:
    raw = json.loads(text)
    paths = {name: Path(raw[name]) if raw[name] else None for name in ("folder", "text", "kept")}
    return Order(**{**raw, **paths, "presets": tuple(raw["presets"]), "gate": Gate(**raw["gate"])})


def run(order: Order, home: Home, told: Callable[[dict[str, Any]], None]) -> Calibration:
    """Run the child to its end; `told` gets each message before the last. The child never outlives this call.

    Raises what the child ended with, and WorkerLost where it died, naming its log.
    """
    log = home.logs / f"calibrate-{order.name}.log"
    tmp = Path(tempfile.mkdtemp(prefix="calibrate-", dir=home.tmp))
    held = os.open(tmp, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(held, fcntl.LOCK_EX)  # a daemon that starts now leaves the folder alone
    try:
        keep_kernels(tmp, home.kernels)
        with log.open("wb") as stderr:
            child = subprocess.Popen(
                [*CHILD, order.to_json()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
                env=environment(os.environ, home, tmp, blas.preload(home.root)), cwd=home.root,
            )  # fmt: skip
        try:
            return _listen(child, told, order.name, log)
        finally:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
        os.close(held)


def _listen(
    child: subprocess.Popen[bytes], told: Callable[[dict[str, Any]], None], name: str, log: Path
) -> Calibration:
    assert child.stdout is not None
    for line in child.stdout:
        message = json.loads(line)
        if "result" in message:
            return loads(message["result"])
        if "error" in message:
            raise from_wire(message["error"])
        told(message)
    status = child.wait()
    raise WorkerLost(
        f"the process that calibrated {name} ended with {status}; its log is {log}",
        model=name, reason="exit", status=status, log=str(log),
    )  # fmt: skip
