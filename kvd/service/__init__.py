"""The daemon under a service manager: a launchd user agent on macOS, a systemd user unit on Linux."""

from __future__ import annotations

import sys

from kvd.service.launchd import Launchd
from kvd.service.manager import Manager
from kvd.service.systemd import Systemd


def manager() -> Manager:
    """The one of this system."""
    return Launchd() if sys.platform == "darwin" else Systemd()
