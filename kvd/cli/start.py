"""Start the daemon in the background, and return when it answers.

Takes the flags of `kvd serve`. Starting one that runs is no error; it keeps the flags that it has. `kvd logs` shows its
log, `kvd stop` ends it, `kvd install` starts it at each login.

  kvd start
  kvd start --memory-limit 8GiB
  kvd start --json         pid, home, socket, version, budget_bytes, started
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from kvclient import Client, start
from kvclient.errors import Unreachable
from kvd.cli import serve
from kvd.cli.output import print_json, waiting
from kvd.cli.settings import config_of, flags_of
from kvd.cli.view import ready
from kvd.config import Config
from kvd.home import Home


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="where it runs, as JSON")
    serve.configure(parser)


def run(args: argparse.Namespace) -> int:
    config, flags = config_of(args), flags_of(args)
    status = _running(config.socket)
    started = status is None
    if status is None:
        status = _start(config, flags)
    elif flags:
        print("kvd: it runs already, the flags change nothing; `kvd stop` first", file=sys.stderr)
    budget = status["memory"]["budget_bytes"]
    if args.json:
        row = {name: status[name] for name in ("pid", "home", "version")}
        print_json(row | {"socket": config.socket, "budget_bytes": budget, "started": started})
    elif started:
        print(ready(status["version"], status["home"], budget))
    else:
        print(f"kvd {status['version']} runs already in {status['home']}, pid {status['pid']}")
    return 0


def _running(socket: Path) -> dict[str, Any] | None:
    try:
        with Client(socket, autostart=False) as client:
            return client.status()
    except Unreachable as problem:
        if not problem.details.get("absent"):
            raise
        return None


def _nothing(line: str) -> None:
    """`waiting` tells enough."""


def _start(config: Config, flags: list[str]) -> dict[str, Any]:
    Home(config.home).create()
    with waiting("starting kvd"), start.starting(config.socket, _nothing, config.home, flags) as starting:
        while not starting.ready():
            time.sleep(start.POLL_S)
    with Client(config.socket, autostart=False) as client:
        return client.status()
