"""Stop the running daemon.

Running requests get time to finish (daemon.drain, or --now for none), what is not on disk yet is flushed, then the
models' memory is given back. Stopping a daemon that does not run is no error.

  kvd stop
  kvd stop --now
"""

from __future__ import annotations

import argparse
import sys
import time

from kvclient import Client
from kvclient.errors import Timeout, Unreachable
from kvd.cli.output import print_json
from kvd.config import load
from kvd.home import Home, holder


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--now", action="store_true", help="do not wait for running requests; they end with an error")
    parser.add_argument("--json", action="store_true", help="stopped: whether one ran, as JSON")


def run(args: argparse.Namespace) -> int:
    drain = 0.0 if args.now else load().daemon.drain
    home = Home.default()
    ours = holder(home)
    try:
        with Client(autostart=False) as client:
            client.shutdown(drain_s=drain)
    except Unreachable:
        if args.json:
            print_json({"stopped": False})
        else:
            print("kvd: not running", file=sys.stderr)
        return 0
    from kvd.front.app import ENDING_S

    patience = drain + ENDING_S
    deadline = time.monotonic() + patience
    while ours is not None and holder(home) in (ours, 0):  # 0: it has wiped its pid, and lets go next
        if time.monotonic() > deadline:
            raise Timeout(f"process {ours} is still stopping after {patience:.0f} s", limit_s=patience, stage="stop")
        time.sleep(0.02)
    if args.json:
        print_json({"stopped": True})
    else:
        print("stopped")
    return 0
