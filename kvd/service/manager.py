"""What every service manager does for kvd, and the parts they share."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from importlib import resources
from pathlib import Path
from typing import ClassVar

from kvclient.errors import BadRequest, Internal

_PASSED_ON = ("KVD_HOME", "KVD_SOCKET", "XDG_DATA_HOME", "HF_HOME", "HF_ENDPOINT")
"""Variables of the installing shell that decide where the daemon finds things: the service gets the same."""


class Manager(ABC):
    """Installing is idempotent and replaces whatever an older version, or another environment, had installed."""

    tool: ClassVar[str]

    @property
    @abstractmethod
    def file(self) -> Path:
        """The definition this manager reads."""

    @abstractmethod
    def render(self) -> bytes:
        """The definition's content, for this environment and these variables. Pure but for reading both."""

    @abstractmethod
    def _start(self) -> None:
        """Load the definition and (re)start the service."""

    @abstractmethod
    def _stop(self) -> None:
        """Stop and unload; no error when it is not loaded."""

    @abstractmethod
    def program(self) -> Path | None:
        """The interpreter that the installed definition starts, None without one."""

    def install(self) -> bool:
        """Write, load, start. True when an older definition was replaced. Raises BadRequest without the manager's
        tool, Unreachable where it has no session of this user, and Internal, with its words, when it refuses."""
        self._need_tool()
        replaced = self.file.exists()
        self.file.parent.mkdir(parents=True, exist_ok=True)
        new = self.file.with_name(self.file.name + ".new")
        new.write_bytes(self.render())
        if replaced:
            self._stop()
        new.replace(self.file)
        self._start()
        return replaced

    def uninstall(self) -> bool:
        """Stop, unload, delete. False when nothing was installed."""
        if not self.file.exists():
            return False
        self._need_tool()
        self._stop()
        self.file.unlink()
        return True

    def call(self, *arguments: str, check: bool = True) -> int:
        done = subprocess.run([self.tool, *arguments], capture_output=True, text=True)
        if check and done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise Internal(
                f"{self.tool} {' '.join(arguments)} failed with {done.returncode}{': ' + said[-1] if said else ''}",
                command=self.tool, exit=done.returncode,
            )  # fmt: skip
        return done.returncode

    def _need_tool(self) -> None:
        if shutil.which(self.tool) is None:
            raise BadRequest(
                f"{self.tool} is not on this machine; run `kvd serve` under the supervisor you have", tool=self.tool
            )


def command() -> list[str]:
    """What the service runs. By interpreter, not by script: scripts keep the path they were installed under."""
    return [sys.executable, "-P", "-m", "kvd.cli.main", "serve"]


def environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _PASSED_ON if os.environ.get(name)}


def template(name: str) -> bytes:
    """A file of `launchd/`: beside the package in a checkout, inside it in a wheel."""
    checkout = Path(__file__).resolve().parents[2] / "launchd" / name
    if checkout.exists():
        return checkout.read_bytes()
    return (resources.files("kvd.service") / "templates" / name).read_bytes()
