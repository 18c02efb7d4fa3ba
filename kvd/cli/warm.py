"""Prefill a document or system text before anyone asks about it.

Reads what `kv` would send for these files as stdin, up to where the question starts, and keeps its KV in memory and on
disk; the first real question then computes only itself. --pin keeps it from eviction (for --ttl, else for good).

  kvd warm demo manual.md
  kvd warm demo -s "You are a reviewer." src/*.py --pin --ttl 7d
"""

from __future__ import annotations

import argparse

from kvclient import Client
from kvd.cli import prompts
from kvd.cli.durations import duration

DURABLE_WAIT_MS = 60_000
"""this verb is for what is kept: it waits for the disk"""


def configure(parser: argparse.ArgumentParser) -> None:
    prompts.add_arguments(parser, "*")
    parser.add_argument("--pin", action="store_true", help="keep it from eviction")
    parser.add_argument("--ttl", type=duration, metavar="TIME", help="pin it for this time, e.g. 7d")


def run(args: argparse.Namespace) -> int:
    if args.ttl and not args.pin:
        args.pin = True
    body = prompts.body_of(args.files, args.system, args.raw)
    with Client() as client:
        stats = client.warm(
            args.model, **body, pin=args.pin or None, ttl_s=args.ttl, durable_wait_ms=DURABLE_WAIT_MS
        )
    print(
        f"{stats.prompt_tokens:,} tokens: {stats.computed_tokens:,} computed, "
        f"{stats.cached_memory_tokens:,} were in memory, {stats.cached_ssd_tokens:,} on disk; "
        f"{stats.stored_tokens:,} stored{', pinned' if args.pin else ''}"
    )
    return 0
