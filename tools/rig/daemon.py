"""A real daemon in a home of its own: started, restarted, killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvclient import Client, KvdError
from kvclient.errors import Unreachable

START_LIMIT_S = 60.0


class Daemon:
    """`kvd serve` as a child. One per home; `home` may be shared by several in turn, never at once.

    The home's path must be short: sockets live in it (104 bytes on macOS).
    """

    def __init__(self, home: Path, *flags: str, env: dict[str, str] | None = None) -> None:
        self.home = home
        self.flags = flags
        self.env = {**os.environ, "KVD_HOME": str(home), **(env or {})}
        self.env.pop("KVD_SOCKET", None)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        return self.home / "run" / "kvd.sock"

    def start(self) -> Daemon:
        """Returns when it answers. Raises RuntimeError with its stderr when it ends first."""
        kvd = Path(sys.executable).parent / "kvd"
        log = (self.home / "serve.stderr").open("ab")
        with log:
            self.process = subprocess.Popen(
                [str(kvd), "serve", *self.flags], env=self.env, stdout=subprocess.DEVNULL, stderr=log
            )
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"kvd serve ended with {self.process.returncode}: {self.stderr()[-2000:]}")
            with contextlib.suppress(Unreachable), self.client() as client:
                client.ping()
                return self
            time.sleep(0.02)
        raise RuntimeError(f"kvd serve did not answer within {START_LIMIT_S} s: {self.stderr()[-2000:]}")

    def stderr(self) -> str:
        return (self.home / "serve.stderr").read_text(errors="replace")

    def client(self) -> Client:
        return Client(socket=self.socket)

    def status(self) -> dict[str, Any]:
        with self.client() as client:
            return client.status()

    def worker_pids(self) -> list[int]:
        return [model["pid"] for model in self.status()["models"] if model.get("pid")]

    def stop(self) -> None:
        """A clean stop: drained and flushed."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            self.process = None

    def kill(self) -> None:
        """SIGKILL to the front and every worker at once, as a power button would."""
        assert self.process is not None
        with contextlib.suppress(KvdError):
            victims = self.worker_pids()
            self.kill_pids([self.process.pid, *victims])
        self.kill_pids([self.process.pid])
        self.process.wait()
        self.process = None

    def kill_pids(self, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def restart(self) -> Daemon:
        self.stop()
        return self.start()

    def __enter__(self) -> Daemon:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()


@contextlib.contextmanager
def short_home(models: Path | None = None) -> Iterator[Path]:
    """A fresh home with a short path, removed at the end; `models` (a folder of models) is linked into it."""
    home = Path(tempfile.mkdtemp(prefix="kvd", dir="/tmp"))
    try:
        if models is not None:
            (home / "models").mkdir(mode=0o700)
            for model in models.iterdir():
                (home / "models" / model.name).symlink_to(model.resolve())
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


def demo_models() -> Path:
    """The folder that holds the imported demo model, pulled once per checkout and kept in its cache.

    `KVD_DEMO_HOME` names another home that has it already.
    """
    named = os.environ.get("KVD_DEMO_HOME")
    home = Path(named) if named else Path(__file__).resolve().parents[2] / ".venv" / "demo-home"
    if not (home / "models" / "demo" / "config.json").exists():
        kvd = Path(sys.executable).parent / "kvd"
        subprocess.run([str(kvd), "pull", "demo"], env={**os.environ, "KVD_HOME": str(home)}, check=True)
    return home / "models"
