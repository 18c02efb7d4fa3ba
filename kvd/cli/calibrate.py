"""Measure what KV precisions cost on a model, on real text, and keep the result with it.

Runs in a process of its own, beside a daemon or without one. Every preset prefills a long document through a pool of
that precision; its last positions are compared with native KV: KL divergence, most likely token, perplexity. Six
questions and five planted needles (facts hidden in the text) follow. Then keys and values alone, each layer alone, and
a search for the best table, a precision for each layer, within --budget bytes per token (without it: the smallest that
passes the limits models.kv_max_kld and models.kv_min_same_top). `kvd load MODEL --kv auto` uses what passed.

"native again" is native KV with the text cut into other chunks: what it shows is rounding, and no precision can be told
from native below it. Later runs on the same text, weights and machine take over what was measured, so that another
budget or preset costs only its own time.

  kvd calibrate demo
  kvd calibrate demo --budget 9000
  kvd calibrate demo --tokens 1024 --presets k8v8,k8v4 --plot demo.svg
  kvd calibrate mine --text contracts.txt --budget 40000
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvclient.errors import BadRequest
from kvd.calibrate.material import LEAST
from kvd.calibrate.result import ENOUGH
from kvd.units import format_duration

if TYPE_CHECKING:
    from kvd.calibrate.process import Order
    from kvd.calibrate.result import Calibration
    from kvd.home import Home


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="name, as `kvd models` lists it")
    parser.add_argument("--text", type=Path, metavar="FILE", help="text to measure on (default: one of kvd's own)")
    parser.add_argument("--tokens", type=_tokens, metavar="N",
                        help="how much of it (default: 8,192 or the model's limit; on the CPU 2,048)")  # fmt: skip
    parser.add_argument("--presets", metavar="LIST", help="precisions to measure, separated by commas (default: all)")
    parser.add_argument("--budget", type=_number, metavar="BYTES", help="most bytes of KV per token in all layers")
    parser.add_argument("--fresh", action="store_true", help="measure everything again and replace what is kept")
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON (- for standard output)")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw quality against memory")


def run(args: argparse.Namespace) -> int:
    from kvd.calibrate import process, result, table
    from kvd.calibrate.plot import svg
    from kvd.home import Home

    home = Home.default()
    home.create()
    order = _order(args, home)
    _check_outputs(args)
    with _progress() as told:
        found = process.run(order, home, told)
    kept = _keep(home.models / order.name, found, args.fresh)
    if args.plot:
        args.plot.write_text(svg(found), encoding="utf-8")
    if args.json and args.json != "-":
        Path(args.json).write_text(result.dumps(found), encoding="utf-8")
    if args.json == "-":
        print(result.dumps(found), end="")
        print(kept, file=sys.stderr)
        return 0
    for line in table.lines(found):
        print(line)
    print(kept)
    return 0


def _keep(folder: Path, found: Calibration, fresh: bool) -> str:
    """With the model, unless what is there of the same weights is over a longer text; says which."""
    from kvd.calibrate import result

    try:
        there = result.stored(folder)
    except ValueError:
        there = None
    if there is not None and there.identity == found.identity and there.tokens > found.tokens and not fresh:
        which = f"{folder / result.FILE} is over {there.tokens:,} tokens"
        return f"not kept, auto goes by the longer measurement: {which} (--fresh replaces it)"
    return f"kept in {result.save(folder, found)}"


def _check_outputs(args: argparse.Namespace) -> None:
    """Before minutes of measuring. Raises BadRequest."""
    for path in (args.plot, Path(args.json) if args.json and args.json != "-" else None):
        if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
            raise BadRequest(f"cannot write {path}", path=str(path))


def _order(args: argparse.Namespace, home: Home) -> Order:
    """Raises BadRequest for what cannot be measured, before anything is loaded."""
    from kvd import config, machine
    from kvd.cache.precision import PRESETS, table_of
    from kvd.calibrate.process import Order
    from kvd.calibrate.result import Gate
    from kvd.models.fingerprint import MEMO, identify
    from kvd.models.record import find

    settings = config.load(home.root)
    record, folder = find(home.root, args.model)
    presets = PRESETS if args.presets is None else tuple(name.strip() for name in args.presets.split(","))
    for name in presets:
        table_of(name)
    if args.text is not None:
        try:
            args.text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise BadRequest(f"cannot read {args.text} as text: {problem}", path=str(args.text)) from None
    return Order(
        name=record.name, folder=folder, identity=identify(folder, home.models / MEMO).whole, presets=presets,
        gate=Gate(settings.models.kv_max_kld, settings.models.kv_min_same_top), block_size=settings.cache.block_size,
        memory=machine.budget(settings.memory.limit, machine.memory()), tokens=args.tokens, budget=args.budget,
        text=args.text.absolute() if args.text else None, kept=None if args.fresh else home.models / record.name,
    )  # fmt: skip


@contextmanager
def _progress() -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar when stderr is a terminal, else a line per stage; what is going to happen, in both."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[left]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=None, left="")

        def told(message: dict[str, Any]) -> None:
            if "plan" in message:
                bar.console.print(_forecast(message["plan"]), highlight=False)
                bar.update(task, total=1.0)
            elif "share" in message:
                left = f"{_about(message['left'])} left"
                bar.update(task, completed=message["share"], description=message["doing"], left=left)

        yield told


class _Lines:
    """Each new stage once; with the time left where it is a long one."""

    def __init__(self) -> None:
        self._doing = ""

    def __call__(self, message: dict[str, Any]) -> None:
        if "plan" in message:
            print(_forecast(message["plan"]), file=sys.stderr, flush=True)
        elif message.get("doing", "") != self._doing:
            self._doing = message["doing"]
            long = message["kind"] in ("native", "preset", "table")
            left = f" (about {_about(message['left'])} left)" if long else ""
            print(f"{self._doing}{left}", file=sys.stderr, flush=True)


def _forecast(plan: dict[str, Any]) -> str:
    tokens, about = plan["tokens"], _about(plan["seconds"])
    if plan["since"] is not None:
        day = time.strftime("%d %B %Y", time.localtime(plan["since"]))
        return f"{tokens:,} tokens; most is taken over from {day} (--fresh measures it again): {about} at most"
    said = f"{tokens:,} tokens, {plan['settings']} settings and a search: about {about}"
    if plan["backend"] != "cpu":
        return said
    enough = min(ENOUGH, plan["context"])
    more = f"; --tokens {enough} says more and takes longer" if tokens < enough else ""
    return f"{said} on this machine's CPU (--tokens N for less{more})"


def _about(seconds: float) -> str:
    return format_duration(60 * round(seconds / 60) if seconds > 90 else max(1, round(seconds)))


def _tokens(text: str) -> int:
    number = _number(text)
    if number < LEAST:
        raise argparse.ArgumentTypeError(f"at least {LEAST} are needed")
    return number


def _number(text: str) -> int:
    digits = text.replace(",", "").replace("_", "")
    if not digits.isdecimal():
        raise argparse.ArgumentTypeError(f"not a number: {text!r}")
    return int(digits)
