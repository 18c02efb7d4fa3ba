"""Models that are here, and which of them are loaded.

Works without a daemon too: then it lists the models folder.

  kvd models
  kvd models --json
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from kvclient.errors import Unreachable
from kvd.cli.daemon import running
from kvd.cli.output import console, print_json, table
from kvd.home import Home
from kvd.units import format_age, format_size


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(args: argparse.Namespace) -> int:
    try:
        with running() as client:
            models = client.models()
    except Unreachable:
        models = on_disk(Home.default())
    if args.json:
        print_json(models)
    elif not models:
        print("no models yet; `kvd pull demo` brings a small one")
    else:
        columns = ["MODEL", "STATE", "KV", "WEIGHTS", "KV IN MEMORY", "LAST USE"]
        console().print(table(columns, [row(model) for model in models]))
    return 0


def row(model: dict[str, Any]) -> list[str]:
    """One line; what a model does not say stays blank."""
    used = model.get("last_used")
    return [
        str(model["name"]),
        str(model.get("state", "not loaded")),
        str(model.get("kv_precision") or ""),
        format_size(model["weights_bytes"]) if model.get("weights_bytes") else "",
        format_size(model["pool_bytes"]) if model.get("pool_bytes") else "",
        f"{format_age(time.time() - used)} ago" if used else "",
    ]


def on_disk(home: Home) -> list[dict[str, Any]]:
    """What `kvd.json` in each model's folder says, without a daemon."""
    found = []
    for file in sorted(home.models.glob("*/kvd.json")):
        try:
            about = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as problem:
            about = {"problem": str(problem)}
        found.append({"name": file.parent.name, "state": "not loaded", **about})
    return found
