"""Load a model now, so that the first request need not wait for it.

--kv sets the precision of its KV cache: native, or keys and values apart in bits (k8v8, k8v4, k6v4, k4v4, …), with
overrides by layer (k8v4,0-3=k8v8), or auto for what `kvd calibrate` found. Loading again with another precision
replaces the model once it has no requests; its cache on disk stays. The model keeps it, also when it is unloaded for
memory or its TTL and comes back, until `kvd unload`. A model has one precision at a time; to have two, pull it under a
second name (the weights are then in memory twice).

  kvd load demo
  kvd load demo --kv k8v4 --pin
"""

from __future__ import annotations

import argparse
import sys

from kvclient import Client
from kvd.cli.durations import duration
from kvd.cli.output import print_json, waiting
from kvd.models.backend import expected
from kvd.units import format_size


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="name, as `kvd models` lists it")
    parser.add_argument("--kv", metavar="PRESET", help="KV precision (default: the one asked for last, else models.kv)")
    parser.add_argument("--pin", action="store_true", help="never unload it for another model")
    parser.add_argument("--ttl", type=duration, metavar="TIME", help="unload when idle this long, e.g. 30m")
    parser.add_argument("--json", action="store_true", help="what the daemon says of it, as JSON")


def run(args: argparse.Namespace) -> int:
    once = " (a first load may compile kernels for a minute)" if expected() == "cuda" else ""
    with Client() as client, waiting(f"loading {args.model}{once}"):
        info = client.load(args.model, kv=args.kv, pin=args.pin or None, ttl_s=args.ttl)
    if args.json:
        print_json({"model": info["name"]} | info)
        return 0
    for warning in info.get("warnings", []):
        print(f"kvd: {warning}", file=sys.stderr)
    parts = [f"{info['name']} is loaded"]
    if info.get("kv_precision"):
        parts.append(f"· KV {info['kv_precision']}")
    if info.get("weights_bytes"):
        parts.append(f"· weights {format_size(info['weights_bytes'])}")
    if "load_s" in info:
        parts.append(f"· loading took {info['load_s']:.1f} s")
    print(" ".join(parts))
    for line in info.get("kv_layers", []):
        print(f"  {line}")
    if info.get("kv_bytes_per_token"):
        print(f"  {info['kv_bytes_per_token']:,} bytes of KV per token")
    return 0
