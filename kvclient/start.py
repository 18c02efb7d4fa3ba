"""Starting the daemon in the background: by `kvd start`, or on demand where the user allowed it (`KVD_AUTOSTART=1`, or
`autostart = true` under `[daemon]` in `$KVD_HOME/kvd.toml`).

Of many clients that find no daemon at once one holds a lock and starts it, the others wait for the socket. The lock
only saves processes: that there is one daemon is decided by the daemon's own lock.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvclient import paths
from kvclient.configured import section
from kvclient.errors import BadRequest, Unreachable
from kvclient.hub import probe

if TYPE_CHECKING:
    import subprocess

DEADLINE_S: Final = 30.0
"""From the first look to a daemon that listens."""
LOSER_S: Final = 5.0
"""How long to go on waiting after the started process ended: another one may hold the daemon's lock."""
POLL_S: Final = 0.05
WORDS: Final = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}

Report = Callable[[str], None]


def allowed(home: Path) -> bool:
    """Raises BadRequest for a `KVD_AUTOSTART` that is neither yes nor no. A config file that cannot be read counts as
    "not allowed"."""
    if word := os.environ.get("KVD_AUTOSTART"):
        if (answer := WORDS.get(word.lower())) is None:
            raise BadRequest(f"KVD_AUTOSTART must be 1 or 0, got {word[:40]!r}", value=word[:40])
        return answer
    return section(home, "daemon").get("autostart") is True


def say(line: str) -> None:
    """The usual Report: one line on stderr."""
    print(f"kvd: {line}", file=sys.stderr, flush=True)


def command() -> list[str]:
    """`kvd serve` of the environment this program runs in, else of PATH. Raises Unreachable if there is none."""
    import shutil

    beside = Path(sys.executable).with_name("kvd")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("kvd")
    if found is None:
        raise Unreachable("no daemon runs and no `kvd` is installed that could be started")
    return [found, "serve"]


class Start:
    """A start in progress: call `ready` until it is True, `POLL_S` apart (so a caller may await in between). Close it
    in any case. `flags` are those of `kvd serve`; paths among them are relative to where this process is."""

    def __init__(self, socket: Path, home: Path, report: Report, flags: Sequence[str] = ()) -> None:
        self._socket, self._home, self._report, self._flags = socket, home, report, flags
        self._began = time.monotonic()
        self._ended: float | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: int | None = None
        for folder in (home, home / "run", home / "logs"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._log = home / "logs" / "autostart.log"
        report(f"no daemon at {socket}; waiting for one to start")

    def ready(self) -> bool:
        """Raises Unreachable when the daemon did not come up, with the last line it said."""
        if not self._listens():
            self._advance(time.monotonic())
            return False
        self._report(f"the daemon is up after {time.monotonic() - self._began:.1f} s")
        return True

    def _listens(self) -> bool:
        try:
            probe(paths.control_path(self._socket))
            probe(self._socket)
        except Unreachable:
            return False
        return True

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _advance(self, now: float) -> None:
        if self._process is None and self._lock is None and self._take_lock() and not self._listens():
            self._spawn()
        if self._process is not None and self._ended is None and self._process.poll() is not None:
            self._ended = now
        late = now - self._began >= DEADLINE_S
        if late or (self._ended is not None and now - self._ended >= LOSER_S):
            self.close()
            raise Unreachable(
                f"the daemon did not start{f' within {DEADLINE_S:g} s' if late else ''}: {self._last_line()}",
                socket=str(self._socket), log=str(self._log),
            )  # fmt: skip

    def _take_lock(self) -> bool:
        lock = os.open(self._home / "run" / "autostart.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._lock = lock
        return True

    def _spawn(self) -> None:
        words = [*command(), *self._flags]
        import subprocess

        self._report(f"starting `{' '.join(words)}`")
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                cwd=None if self._flags else self._home,
                env={**os.environ, "KVD_HOME": str(self._home), "KVD_SOCKET": str(self._socket)},
            )  # fmt: skip
        except OSError as problem:
            raise Unreachable(f"cannot start {words[0]}: {problem.strerror}", socket=str(self._socket)) from None
        finally:
            os.close(log)

    def _last_line(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").split("\n")
        except OSError:
            return "it said nothing"
        said = [line for line in lines if line.strip()]
        return said[-1][:300] if said else f"it said nothing; try `{' '.join(command())}`"


@contextmanager
def starting(
    socket: Path, report: Report | None = None, home: Path | None = None, flags: Sequence[str] = ()
) -> Iterator[Start]:
    start = Start(socket, home or paths.home(), report or say, flags)
    try:
        yield start
    finally:
        start.close()
