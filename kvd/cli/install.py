"""Start the daemon at login, and again when it fails.

macOS: a launchd agent in ~/Library/LaunchAgents. Linux: a systemd user unit (`loginctl enable-linger` lets it run
without a login). Installing again replaces what was there, for instance after the environment moved. KVD_HOME and
KVD_SOCKET of this shell go into the service.

  kvd install
  kvd install --print      show the definition, change nothing
"""

from __future__ import annotations

import argparse

from kvclient.errors import Busy
from kvd.home import Home, holder
from kvd.service import manager


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--print", action="store_true", dest="show", help="print the definition and change nothing")


def run(args: argparse.Namespace) -> int:
    service = manager()
    if args.show:
        print(service.render().decode(), end="")
        return 0
    home = Home.default()
    before = holder(home)
    replaced = service.install()
    if before and holder(home) == before:
        raise Busy(
            f"wrote {service.file}, but process {before} serves {home.root} outside of it: "
            "`kvd stop`, then `kvd install` again", pid=before,
        )  # fmt: skip
    print(f"{'replaced' if replaced else 'installed'} {service.file}; the daemon runs and starts at login")
    return 0
