"""macOS: a launchd agent of the logged-in user."""

from __future__ import annotations

import os
import plistlib
import time
from pathlib import Path

from kvclient.errors import Internal, Unreachable
from kvd.home import Home
from kvd.service.manager import Manager, command, environment, template

LABEL = "org.kvd.daemon"
_RETRIES = 40
_RETRY_S = 0.25
"""`bootstrap` may fail for a moment after the old job has gone."""
_GONE_S = 65.0
"""`bootout` returns before the old job is gone, which may take the definition's ExitTimeOut: requests end first."""


class Launchd(Manager):
    tool = "launchctl"

    @property
    def file(self) -> Path:
        return Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"

    def render(self) -> bytes:
        plist = plistlib.loads(template(f"{LABEL}.plist"))
        log = str(Home.default().logs / "service.log")
        plist["ProgramArguments"] = command()
        plist["EnvironmentVariables"] = environment()
        plist["WorkingDirectory"] = str(Home.default().root)
        plist["StandardOutPath"] = plist["StandardErrorPath"] = log
        return plistlib.dumps(plist)

    def program(self) -> Path | None:
        if not self.file.exists():
            return None
        arguments = plistlib.loads(self.file.read_bytes())["ProgramArguments"]
        return Path(str(arguments[0]))

    def _need_tool(self) -> None:
        """Raises Unreachable as well where this user is not logged in at the screen: there is no domain for agents
        then, and nothing is written or deleted."""
        super()._need_tool()
        try:
            self.call("print", self._domain)
        except Internal as problem:
            raise Unreachable(
                f"no graphical session of this user here ({problem.message}): log in at the screen (screen sharing "
                "will do), or run `kvd serve` under another supervisor", **problem.details,
            ) from None  # fmt: skip

    def _start(self) -> None:
        Home.default().create()
        self.call("enable", self._target)
        for attempt in range(_RETRIES):
            try:
                self.call("bootstrap", self._domain, str(self.file))
                return
            except Internal:
                if attempt == _RETRIES - 1:
                    raise
                time.sleep(_RETRY_S)

    def _stop(self) -> None:
        self.call("bootout", self._target, check=False)
        deadline = time.monotonic() + _GONE_S
        while self.call("print", self._target, check=False) == 0 and time.monotonic() < deadline:
            time.sleep(_RETRY_S)

    @property
    def _domain(self) -> str:
        return f"gui/{os.getuid()}"

    @property
    def _target(self) -> str:
        return f"{self._domain}/{LABEL}"
