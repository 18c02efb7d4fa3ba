"""What the daemon is doing: models and their memory, running requests, the store, how much was reused.

  kvd status
  kvd status --json        everything, for programs

The columns of a model:

  STATE     not loaded, loading, loaded, stopping, or down after too many crashes
  KV        precision of its KV
  MEMORY    what it has of memory.limit: weights and KV pool
  POOL      size of its KV pool now
  IN USE    share of the pool that running requests hold, or that is on its way to the store
  CACHED    share of the pool kept for later requests; gives way when room is needed
  LIVE      requests that its process has
  WAITING   requests not begun, at its process or before it
"""

from __future__ import annotations

import argparse

from kvclient import Client
from kvd.cli.output import console, print_json
from kvd.cli.view import page


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="everything, as JSON")


def run(args: argparse.Namespace) -> int:
    with Client(autostart=False) as client:
        status = client.status()
    if args.json:
        print_json(status)
    else:
        console().print(page(status))
    return 0
