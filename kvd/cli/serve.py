"""Run the daemon in the foreground.

It owns the models, their KV caches and the store on disk, and answers `kv`, `kvclient` and `kv-gateway` on a Unix
socket until it is stopped: SIGTERM or Ctrl-C drains running requests, a second one stops at once, SIGHUP reloads the
configuration. Every key of kvd.toml is also a flag here; `kvd config show` prints the result.

On a terminal the log is shown; in the background (`kvd serve &`) only its warnings are. `kvd logs` has all of it.

  kvd serve
  kvd serve --memory-limit 8GiB --store-limit 100GiB
  kvd serve --home /tmp/kvd-try --models-ttl 15m
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvd.cli.settings import add_flags, config_of


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--home", type=Path, metavar="DIR", help="home folder (default: KVD_HOME, else the platform's)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration (default: kvd.toml in the home)")
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    config = config_of(args)
    from kvclient import __version__
    from kvd.front.app import serve
    from kvd.units import format_size

    def ready(budget: int) -> None:
        room = f"{format_size(budget)} for models"
        print(f'kvd {__version__} is ready in {config.home}, {room}; ask with kv "hello"', file=sys.stderr, flush=True)

    return serve(config, ready=ready)
