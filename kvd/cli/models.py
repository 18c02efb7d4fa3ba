"""Models that are here, and which of them are loaded.

Works without a daemon too: then it lists the models folder. ON DISK is the size of a model's files; WEIGHTS and
KV IN MEMORY are what it takes while it is loaded; ALIASES are further names that lead to it (models.aliases).

  kvd models
  kvd models --json
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from typing import Any

from kvclient import Client
from kvclient.errors import KvdError, Unreachable
from kvd.cli.output import console, print_json, table
from kvd.cli.view import unread
from kvd.home import Home
from kvd.units import format_age, format_size


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(args: argparse.Namespace) -> int:
    try:
        with Client(autostart=False) as client:
            models = client.models()
    except Unreachable:
        models = on_disk(Home.default())
    if args.json:
        print_json(models)
    elif not models:
        print("no models yet; `kvd pull demo` brings a small one")
    else:
        columns = ["MODEL", "STATE", "KV", "ON DISK", "WEIGHTS", "KV IN MEMORY", "LAST USE"]
        columns += ["ALIASES"] if any(model.get("aliases") for model in models) else []
        rows = [row(model)[: len(columns)] for model in models]
        console().print(table(columns, rows, right=columns[3:6]))
    for model in models:
        if model.get("unread_s"):
            print(f"kvd: {unread(model)}", file=sys.stderr)
    return 0


def row(model: dict[str, Any]) -> list[str]:
    """One line; what a model does not say stays blank."""
    used = model.get("last_used")
    return [
        str(model["name"]),
        str(model.get("state", "not loaded")),
        str(model.get("kv_precision") or ""),
        format_size(model["disk_bytes"]) if "disk_bytes" in model else "",
        format_size(model["weights_bytes"]) if model.get("weights_bytes") else "",
        format_size(model["pool_bytes"]) if model.get("pool_bytes") else "",
        f"{format_age(time.time() - used)} ago" if used else "",
        ", ".join(model.get("aliases", [])),
    ]


def on_disk(home: Home) -> list[dict[str, Any]]:
    """What is in the models folder, without a daemon."""
    from kvd.config import load
    from kvd.models import record
    from kvd.models.aliases import by_model
    from kvd.models.facts import facts

    names = record.names(home.root)
    aliases = by_model(load(home.root).models.aliases, names)
    found = []
    for name in names:
        try:
            about, files = record.find(home.root, name)
            row: dict[str, Any] = asdict(about) | facts(files)
        except KvdError as problem:
            row = {"problem": problem.message}
        found.append(row | {"name": name, "state": "not loaded", "aliases": aliases.get(name, [])})
    return found
