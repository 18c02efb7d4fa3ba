"""What of a prompt is cached, and where it diverges from what is stored.

Reads the file as `kv` would send it as stdin and computes nothing: how many tokens are in memory and on disk, the first
token that differs with its text on both sides, and why the rest was not reused.

  kvd explain demo manual.md
  git diff | kvd explain demo -
"""

from __future__ import annotations

import argparse
from typing import Any

from kvclient import Client, reasons
from kvd.cli import prompts
from kvd.cli.output import print_json


def configure(parser: argparse.ArgumentParser) -> None:
    prompts.add_arguments(parser, "+")
    parser.add_argument("--json", action="store_true", help="the whole answer as JSON")


def run(args: argparse.Namespace) -> int:
    with Client() as client:
        found = client.explain(args.model, **prompts.body_of(args.files, args.system, args.raw))
    if args.json:
        print_json(found)
    else:
        print("\n".join(lines(found)))
    return 0


def lines(found: dict[str, Any]) -> list[str]:
    """The answer for people."""
    memory, ssd, total = found["cached_memory_tokens"], found["cached_ssd_tokens"], found["prompt_tokens"]
    out = [
        f"{total:>10,} tokens in the prompt",
        f"{memory:>10,} cached in memory",
        f"{ssd:>10,} cached on disk",
        f"{total - memory - ssd:>10,} to compute",
    ]
    if limit := found.get("limit"):
        out.append(f"cannot run: too long by {total - limit:,} tokens; the limit is {limit:,}")
    if split := found.get("first_divergence"):
        out.append(f"differs from what is stored at token {split['token']:,}:")
        out.append(f"    here    {split['text']!r}")
        out.append(f"    stored  {split['stored_text']!r}")
    if (why := found.get("miss_reason")) and why != "diverged":  # of that the lines above tell all
        out.append(f"why not all: {reasons.words(why)}")
    for rule in found.get("rules") or []:
        out.append(f"rule {rule['name']} would save {rule['saved_tokens']:,} tokens")
    return out
