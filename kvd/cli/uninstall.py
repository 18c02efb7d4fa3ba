"""Undo `kvd install`: stop the daemon and remove its agent or unit. Models, store and configuration stay.

  kvd uninstall
"""

from __future__ import annotations

import argparse

from kvd.service import manager


def configure(parser: argparse.ArgumentParser) -> None:
    del parser  # no options


def run(args: argparse.Namespace) -> int:
    service = manager()
    print(f"removed {service.file}" if service.uninstall() else "nothing was installed")
    return 0
