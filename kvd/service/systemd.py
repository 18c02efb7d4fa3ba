"""Linux: a systemd unit of the user. `loginctl enable-linger` lets it run without a login."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from kvclient.errors import Internal, Unreachable
from kvd.service.manager import Manager, command, environment, template

UNIT = "kvd.service"


class Systemd(Manager):
    tool = "systemctl"

    @property
    def file(self) -> Path:
        config = os.environ.get("XDG_CONFIG_HOME")
        return (Path(config) if config else Path.home() / ".config") / "systemd" / "user" / UNIT

    def render(self) -> bytes:
        lines = [f"Environment={_quoted(f'{name}={value}')}" for name, value in environment().items()]
        text = template(UNIT).decode()
        words = (_quoted(word).replace("$", "$$") for word in command())  # only commands expand variables
        text = text.replace("@COMMAND@", " ".join(words))
        text = text.replace("@ENVIRONMENT@\n", "".join(line + "\n" for line in lines))
        return text.encode()

    def program(self) -> Path | None:
        if not self.file.exists():
            return None
        found = re.search(r"^ExecStart=(.*)$", self.file.read_text(), re.MULTILINE)
        return Path(shlex.split(found[1])[0].replace("%%", "%")) if found else None

    def _start(self) -> None:
        self.call("--user", "daemon-reload")
        self.call("--user", "enable", UNIT)
        self.call("--user", "restart", UNIT)

    def _stop(self) -> None:
        self.call("--user", "stop", UNIT, check=False)

    def _need_tool(self) -> None:
        """Raises Unreachable as well where systemd does not run for this user: nothing is written or deleted then."""
        super()._need_tool()
        try:
            self.call("--user", "show-environment")
        except Internal as problem:
            raise Unreachable(
                f"no systemd user session here ({problem.message}): `loginctl enable-linger $USER` and log in again, "
                "or run `kvd serve` under another supervisor", **problem.details,
            ) from None  # fmt: skip

    def uninstall(self) -> bool:
        if self.file.exists():
            self._need_tool()
            self.call("--user", "disable", UNIT, check=False)
        removed = super().uninstall()
        if removed:
            self.call("--user", "daemon-reload")
        return removed


def _quoted(word: str) -> str:
    """For a unit file: specifiers off, quotes where needed."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"' if re.search(r"[\s\"'\\;]", word) else escaped
