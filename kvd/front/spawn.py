"""How a worker process comes into being: its command line, its environment and what it inherits.

The command line is the contract with `kvd.worker.main`:

    python -P -m kvd.worker.main --connect SOCKET --home HOME --model DIR --name NAME --store DIR --leash FD
        --kv PRESET --block-size TOKENS --pool-limit BYTES --pool-initial BYTES --weights-limit BYTES
        [--chunk TOKENS]

`--weights-limit` is what the memory ledger holds for the weights: where they do not fit in float32 they stay as stored.
`--leash` is for `kvd.leash.hold`. A second inherited descriptor holds a lock on `run/workers/<front>-<run>`: the next
front knows by it that this worker is gone.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvd.childenv import environment, keep_kernels
from kvd.home import Home

FRONT = f"{os.getpid()}.{time.time_ns()}"
"""This front among all there were; in a container every one may have the same pid."""
WORKER = (sys.executable, "-P", "-m", "kvd.worker.main")


@dataclass(frozen=True, slots=True)
class Spec:
    """A worker to start. `run` numbers the processes of this front. Sizes in bytes, block and chunk in tokens."""

    run: int
    name: str
    model: Path
    socket: Path
    store: Path
    kv: str
    block_size: int
    chunk: int | None
    pool_limit: int
    pool_initial: int
    weights_limit: int
    preload: Path | None = None
    command: Sequence[str] = field(default=WORKER)

    def arguments(self, home: Home, leash: int) -> list[str]:
        given = {
            "connect": self.socket, "home": home.root, "model": self.model, "name": self.name, "store": self.store,
            "leash": leash, "kv": self.kv, "block-size": self.block_size, "pool-limit": self.pool_limit,
            "pool-initial": self.pool_initial, "weights-limit": self.weights_limit,
        }  # fmt: skip
        if self.chunk is not None:
            given["chunk"] = self.chunk
        return [*self.command, *(text for name, value in given.items() for text in (f"--{name}", str(value)))]


@dataclass(frozen=True, slots=True)
class Spawned:
    """A running worker. Closing `leash` ends it within a second."""

    process: subprocess.Popen[bytes]
    leash: int
    log: Path
    tmp: Path
    record: Path


def spawn(spec: Spec, home: Home) -> Spawned:
    """Start the process by exec, out of reach of a terminal's signals; call it on the main thread, whose death is the
    kernel's death signal to the worker. Raises OSError when the system refuses."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    log = home.logs / f"worker-{spec.name}-{stamp}-{spec.run}.log"
    tmp = home.tmp / f"{FRONT}-{spec.run}"
    tmp.mkdir(mode=0o700, exist_ok=True)
    keep_kernels(tmp, home.kernels)
    record = home.workers / f"{FRONT}-{spec.run}"
    reading, leash = os.pipe()
    held = os.open(record, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                spec.arguments(home, reading), stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr,
                env=environment(os.environ, home, tmp, spec.preload), cwd=home.root,
                pass_fds=(reading, held), start_new_session=True,
            )  # fmt: skip
        os.pwrite(held, f"{process.pid}\n".encode(), 0)
    except OSError:
        os.close(leash)
        raise
    finally:
        os.close(reading)
        os.close(held)
    return Spawned(process, leash, log, tmp, record)
