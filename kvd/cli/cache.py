"""Look into the store of KV blocks and take care of it, with the daemon running or without.

  kvd cache stats              bytes, limits, counters, wear of the drive
  kvd cache ls                 prefixes as a tree: words that tell them apart, tokens, bytes, hits, last use, pins
  kvd cache verify             read every block and check it; damaged ones are set aside
  kvd cache gc                 collect foreign files, leftovers and what is over the limits
  kvd cache clear --yes        drop everything, or what one model has (--model M); loaded models forget it too
  kvd cache rebuild            make the index anew from the blocks
  kvd cache export CHAIN FILE  one prefix as a file, for another machine; --force replaces one that is there
  kvd cache import FILE        take such a file in; refused when it is of other weights or settings
  kvd cache pin CHAIN          keep a prefix (as `ls` names it) from eviction; --ttl 7d lets it expire
  kvd cache unpin CHAIN

In `ls` PREFIX is where a prefix first differs from its siblings, so it changes as they come and go; CHAIN is its name.
HITS count anew after a rebuild. --json prints the whole answer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvclient import Client
from kvclient.errors import BadRequest, Unreachable
from kvd.cli import cacheview
from kvd.cli.durations import duration
from kvd.cli.output import agreed, console, print_json
from kvd.cli.usage import Usage

Answer = dict[str, Any]

SHOWN: dict[str, Callable[[Answer], Any]] = {
    "stats": cacheview.stats,
    "ls": cacheview.tree,
    "verify": cacheview.verified,
    "gc": cacheview.collected,
    "clear": cacheview.cleared,
    "rebuild": cacheview.rebuilt,
    "export": cacheview.exported,
    "import": cacheview.imported,
    "pin": cacheview.pinned,
    "unpin": cacheview.unpinned,
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", default="stats", choices=list(SHOWN), help="default: stats")
    parser.add_argument("arguments", nargs="*", metavar="CHAIN|FILE", help="what export, import, pin and unpin work on")
    parser.add_argument("--model", metavar="M", help="ls, clear: only this model's blocks")
    parser.add_argument("--ttl", type=duration, metavar="TIME", help="pin: it ends after this time")
    parser.add_argument("--yes", action="store_true", help="clear: yes, drop it")
    parser.add_argument("--force", action="store_true", help="export: replace a file that is there")
    parser.add_argument("--json", action="store_true", help="the whole answer as JSON")


def run(args: argparse.Namespace) -> int:
    fields = fields_of(args)
    if args.what == "clear" and not args.yes:
        raise Usage(f"cache clear drops {at_stake(args.model)}; say --yes")
    if args.what == "export" and not args.force and Path(fields["file"]).exists():
        there = f"{fields['file']} is there already"
        if not (sys.stdin.isatty() and agreed(f"{there}; replace it")):
            raise BadRequest(f"{there}; say --force to replace it", path=fields["file"])
    answer = ask(args.what, fields)
    if others := answer.get("shared_with"):
        print(f"kvd: the blocks were those of {cacheview.names(others)} as well: same weights", file=sys.stderr)
    if args.json:
        print_json(answer)
    else:
        console().print(SHOWN[args.what](answer))
    return cacheview.exit_code(args.what, answer)


def fields_of(args: argparse.Namespace) -> dict[str, Any]:
    """The request's fields. Raises Usage for missing or surplus words and options."""
    names = {"export": ["chain", "file"], "import": ["file"], "pin": ["chain"], "unpin": ["chain"]}.get(args.what, [])
    if len(args.arguments) != len(names):
        wanted = " ".join(name.upper() for name in names) or "nothing"
        raise Usage(f"cache {args.what} takes {wanted}")
    fields: dict[str, Any] = dict(zip(names, args.arguments, strict=True))
    if "file" in fields:
        fields["file"] = str(Path(fields["file"]).expanduser().absolute())
    for option, verbs in (("model", ("ls", "clear")), ("ttl", ("pin",)), ("yes", ("clear",)), ("force", ("export",))):
        if getattr(args, option) and args.what not in verbs:
            raise Usage(f"cache {args.what} takes no --{option}")
    if args.model:
        fields["model"] = args.model
    if args.ttl:
        fields["ttl_s"] = args.ttl
    return fields


def at_stake(model: str | None) -> str:
    """What a clear of `model`, a name or an alias, would drop."""
    if model is None:
        return "blocks that cost time to compute"
    stats = ask("stats", {"model": model})
    named = stats["model"]
    others = sorted({name for group in stats["shared"] if named in group for name in group} - {named})
    also = f", those of {cacheview.names(others)} as well (same weights)" if others else ""
    return f"blocks of {named} that cost time to compute{also}"


def ask(verb: str, fields: dict[str, Any]) -> Answer:
    """From the daemon when one runs, else from the store itself, under the home's lock."""
    try:
        with Client(autostart=False) as client:
            return client.cache(verb, **fields)
    except Unreachable:
        return offline(verb, fields)


def offline(verb: str, fields: dict[str, Any]) -> Answer:
    """Raises HomeLocked with the pid when another process owns the home, BadRequest where there is no store (none is
    begun), and whatever the verb raises."""
    from kvd.config import load
    from kvd.front.registry import stored_name
    from kvd.front.storelike import DISK, open_store
    from kvd.home import Home, Lock
    from kvd.models import record
    from kvd.store import mount
    from kvd.store.verbs import names, perform

    config = load()
    home, root = Home(config.home), str(config.store_path)
    then = "; ask the model once (`kv -m NAME hello`), then import again" if verb == "import" else ""
    none = BadRequest(f"no store yet: {root} is begun by `kvd serve`{then}", path=root)
    if not home.run.is_dir() and not mount.has_store(root):
        raise none
    home.create()
    with Lock(home):
        mount.check(root, home.run / DISK)
        if not mount.has_store(root):
            raise none
        with open_store(config) as store:
            if (said := cacheview.trimmed(store.stats())) and verb != "stats":
                console(stderr=True).print(f"kvd: dropped {said}")
            if model := fields.get("model"):
                here = record.names(home.root)
                fields = {**fields, "model": stored_name(model, config.models, here, names(store))}
            return perform(store, verb, fields)
