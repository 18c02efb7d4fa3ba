"""What the daemon is doing: models and their memory, running requests, the store, how much was reused.

  kvd status
  kvd status --json        everything, for programs
"""

from __future__ import annotations

import argparse

from kvd.cli.daemon import running
from kvd.cli.output import console, print_json
from kvd.cli.view import page


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="everything, as JSON")


def run(args: argparse.Namespace) -> int:
    with running() as client:
        status = client.status()
    if args.json:
        print_json(status)
    else:
        console().print(page(status))
    return 0
