"""Prefill a document or system text before anyone asks about it.

Reads what `kv` would send for these files as stdin, up to where the question starts, and keeps its KV in memory and on
disk; the first real question then computes only itself. --pin keeps it from eviction (for --ttl, else for good), and
fails (70) where the store could not take all of it.

  kvd warm demo manual.md
  kvd warm demo -s "You are a reviewer." src/*.py --pin --ttl 7d
  kvd warm demo manual.md --json     the figures of the prefill
"""

from __future__ import annotations

import argparse
from typing import Any

from kvclient import Client
from kvclient.bar import Bar
from kvclient.errors import StoreError
from kvclient.events import Event, Stats
from kvd.cli import prompts
from kvd.cli.durations import duration
from kvd.cli.output import print_json

DURABLE_WAIT_MS = 60_000
"""this verb is for what is kept: it waits for the disk"""


def configure(parser: argparse.ArgumentParser) -> None:
    prompts.add_arguments(parser, "*")
    parser.add_argument("--pin", action="store_true", help="keep it from eviction")
    parser.add_argument("--ttl", type=duration, metavar="TIME", help="pin it for this time, e.g. 7d")
    parser.add_argument("--json", action="store_true", help="figures of the prefill, as JSON")


def run(args: argparse.Namespace) -> int:
    if args.ttl and not args.pin:
        args.pin = True
    body = prompts.body_of(args.files, args.system, args.raw)
    stats = _warmed(args, body)
    if args.json:
        print_json({"model": args.model, "pinned": args.pin, "stats": stats.to_wire()})
    else:
        print(
            f"{stats.prompt_tokens:,} tokens: {stats.computed_tokens:,} computed, "
            f"{stats.cached_memory_tokens:,} were in memory, {stats.cached_ssd_tokens:,} on disk; "
            f"{stats.stored_tokens:,} stored{', pinned' if args.pin and stats.stored_tokens else ''}"
        )
    if args.pin and stats.stored_tokens < stats.prompt_tokens:
        raise StoreError(
            f"only {stats.stored_tokens:,} of {stats.prompt_tokens:,} tokens are stored and pinned; "
            "`kvd cache stats` says why the store refused the rest"
        )
    return 0


def _warmed(args: argparse.Namespace, body: dict[str, Any]) -> Stats:
    """With the bar that `kv` shows."""
    bar = Bar.for_stderr()

    def show(event: Event) -> None:
        if event.progress is not None:
            bar.prefill(event.progress)
        elif event.kind == "queued":
            bar.queued(event.position or 0)

    with Client() as client:
        try:
            return client.warm(
                args.model, **body, pin=args.pin or None, ttl_s=args.ttl, durable_wait_ms=DURABLE_WAIT_MS, on_event=show
            )
        finally:
            bar.clear()
