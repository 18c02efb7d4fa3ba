"""Live view of requests, memory and reuse, until q or Ctrl-C.

ROWS/S are tokens fed to the model per second, prefill and decode together.

  kvd top
  kvd top --every 5s
  kvd top --once           one page, as `kvd status` with rates; so too where stdout is no terminal
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from kvclient import Client
from kvd.cli.durations import duration
from kvd.cli.keys import Keys
from kvd.cli.output import console
from kvd.cli.view import page


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--every", type=duration, default=1.0, metavar="TIME", help="between samples (default: 1s)")
    parser.add_argument("--once", action="store_true", help="print one page and end")


def run(args: argparse.Namespace) -> int:
    from rich.live import Live

    with Client(autostart=False) as client:
        sample = Sample(client)
        if args.once or not sys.stdout.isatty():
            time.sleep(args.every)
            console().print(sample.next())
            return 0
        with Keys() as keys, Live(sample.next(), screen=True, auto_refresh=False) as live:
            while not keys.pressed("q", args.every):
                live.update(sample.next(), refresh=True)
    return 0


class Sample:
    """Status after status, with what changed between two."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._fed, self._at = self._look(client.status()), time.monotonic()

    def next(self) -> Any:
        """A page with rates since the last one."""
        status = self._client.status()
        now, fed = time.monotonic(), self._look(status)
        passed = max(1e-3, now - self._at)
        rates = {name: max(0, count - self._fed.get(name, count)) / passed for name, count in fed.items()}
        self._fed, self._at = fed, now
        return page(status, rates)

    @staticmethod
    def _look(status: dict[str, Any]) -> dict[str, int]:
        return {model["name"]: int(model.get("rows_fed", 0)) for model in status.get("models", [])}
