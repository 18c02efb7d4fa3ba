"""Give a model's memory back. Its KV cache on disk stays, so the next load starts warm. What `kvd load` asked for with
--kv and --pin is forgotten: the next load is at the configured precision.

  kvd unload demo
"""

from __future__ import annotations

import argparse

from kvd.cli.daemon import running


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="name, as `kvd models` lists it")


def run(args: argparse.Namespace) -> int:
    with running() as client:
        was_loaded = client.unload(args.model)["unloaded"]
    print(f"{args.model} {'unloaded' if was_loaded else 'was not loaded'}")
    return 0
