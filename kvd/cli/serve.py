"""Run the daemon in the foreground.

It owns the models, their KV caches and the store on disk, and answers `kv`, `kvclient` and `kv-gateway` on a Unix
socket until it is stopped: SIGTERM or Ctrl-C drains running requests, a second one stops at once, SIGHUP reloads the
configuration. Every key of kvd.toml is also a flag here; `kvd config show` prints the result.

On a terminal the log is shown; in the background only its warnings are. `kvd logs` has all of it. `kvd start` runs the
same in the background and returns when it answers.

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
    from kvd.cli.view import ready
    from kvd.front.app import serve

    def say(budget: int) -> None:
        print(ready(__version__, config.home, budget), file=sys.stderr, flush=True)

    return serve(config, ready=say)
