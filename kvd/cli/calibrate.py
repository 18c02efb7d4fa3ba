"""Measure what KV precisions cost on a model, on real text, and keep the result with it.

Runs in a process of its own, beside a daemon or without one. Every preset prefills a long document through a pool of
that precision; its last positions are compared with native KV: KL divergence, most likely token, perplexity. Six
questions and five planted needles follow. Then keys and values alone, each layer alone, and a search for the best table
under --budget bytes per token (without it: the smallest that passes). `kvd load MODEL --kv auto` uses what passed.

  kvd calibrate demo
  kvd calibrate demo --tokens 1024 --presets k8v8,k8v4 --plot demo.svg
  kvd calibrate mine --text contracts.txt --budget 40000
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvclient.errors import BadRequest
from kvd.units import format_duration

LEAST_TOKENS = 256


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="name, as `kvd models` lists it")
    parser.add_argument("--text", type=Path, metavar="FILE", help="text to measure on (default: one of kvd's own)")
    parser.add_argument("--tokens", type=_tokens, metavar="N",
                        help="how much of it (default: 8,192 or the model's limit; on the CPU 2,048)")  # fmt: skip
    parser.add_argument("--presets", metavar="LIST", help="precisions to measure, separated by commas (default: all)")
    parser.add_argument("--budget", type=int, metavar="BYTES", help="bytes of KV per token that the table may take")
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON (- for standard output)")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw quality against memory")


def run(args: argparse.Namespace) -> int:
    from kvd.calibrate import process, result, table
    from kvd.calibrate.plot import svg
    from kvd.home import Home

    home = Home.default()
    home.create()
    order = _order(args, home)
    with _progress() as told:
        found = process.run(order, home, told)
    path = result.save(home.models / order.name, found)
    if args.plot:
        args.plot.write_text(svg(found), encoding="utf-8")
    if args.json and args.json != "-":
        Path(args.json).write_text(result.dumps(found), encoding="utf-8")
    if args.json == "-":
        print(result.dumps(found), end="")
        return 0
    for line in table.lines(found):
        print(line)
    print(f"kept in {path}")
    return 0


def _order(args: argparse.Namespace, home: Any) -> Any:
    """Raises BadRequest for what cannot be measured, before anything is loaded."""
    from kvd import config
    from kvd.cache.precision import PRESETS, table_of
    from kvd.calibrate.process import Order
    from kvd.calibrate.result import Gate
    from kvd.front.memory import budget, machine
    from kvd.models.fingerprint import MEMO, identify
    from kvd.models.record import find

    settings = config.load(home.root)
    record, folder = find(home.root, args.model)
    presets = tuple(name.strip() for name in args.presets.split(",")) if args.presets else PRESETS
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
        memory=budget(settings.memory.limit, machine()), tokens=args.tokens, budget=args.budget,
        text=args.text.absolute() if args.text else None,
    )  # fmt: skip


@contextmanager
def _progress() -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar when stderr is a terminal, else a line per setting; what is going to happen, in both."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=None)

        def told(message: dict[str, Any]) -> None:
            if "plan" in message:
                bar.console.print(_forecast(message["plan"]), highlight=False)
                bar.update(task, total=message["plan"]["rows"])
            elif "at" in message:
                bar.update(task, completed=message["at"], description=message["doing"])

        yield told


class _Lines:
    """Each new setting once."""

    def __init__(self) -> None:
        self._doing = ""

    def __call__(self, message: dict[str, Any]) -> None:
        if "plan" in message:
            print(_forecast(message["plan"]), file=sys.stderr, flush=True)
        elif message.get("doing", "") != self._doing:
            self._doing = message["doing"]
            print(self._doing, file=sys.stderr, flush=True)


def _forecast(plan: dict[str, Any]) -> str:
    said = f"{plan['tokens']:,} tokens, {plan['full']} settings and a search: about {_about(plan['seconds'])}"
    if plan["backend"] != "cpu":
        return said
    enough = min(8192, plan["context"])
    other = f"; --tokens {enough} says more and takes longer" if plan["tokens"] < enough else ""
    return f"{said} on this machine's CPU (--tokens N for less{other})"


def _about(seconds: float) -> str:
    return format_duration(60 * round(seconds / 60) if seconds > 90 else max(1, round(seconds)))


def _tokens(text: str) -> int:
    number = int(text.replace(",", "").replace("_", ""))
    if number < LEAST_TOKENS:
        raise argparse.ArgumentTypeError(f"at least {LEAST_TOKENS} are needed")
    return number
