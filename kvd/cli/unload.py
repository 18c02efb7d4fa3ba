"""Give a model's memory back. Its KV cache on disk stays, so the next load starts warm. What `kvd load` asked for with
--kv and --pin is forgotten: the next load is at the configured precision.

  kvd unload demo
"""

from __future__ import annotations

import argparse

from kvclient import Client
from kvd.cli.output import print_json


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="name, as `kvd models` lists it")
    parser.add_argument("--json", action="store_true", help="model, unloaded: as JSON")


def run(args: argparse.Namespace) -> int:
    with Client(autostart=False) as client:
        answer = client.unload(args.model)
    if args.json:
        print_json(answer)
    else:
        print(f"{answer['model']} {'unloaded' if answer['unloaded'] else 'was not loaded'}")
    return 0
