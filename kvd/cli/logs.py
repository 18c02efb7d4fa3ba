"""The daemon's log, and those of workers that crashed.

The log is JSON, one event a line; here it is printed for people. Prompt text is never in it unless daemon.log_prompts
is on. Every line of a request carries its id.

  kvd logs                 the last 50 lines
  kvd logs -f              … and what comes
  kvd logs --request ID    one request
  kvd logs --workers       stderr of workers, newest last
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from kvclient.errors import BadRequest
from kvd.cli.usage import Usage
from kvd.home import Home

_POLL_S = 0.2


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-f", "--follow", action="store_true", help="go on with new lines until Ctrl-C")
    parser.add_argument("-n", "--lines", type=_count, default=50, metavar="N", help="how many old lines (default: 50)")
    parser.add_argument("--request", metavar="ID", help="only lines of this request")
    parser.add_argument("--json", action="store_true", help="the lines as they are")
    parser.add_argument("--workers", action="store_true", help="list and print the logs of workers instead")


def run(args: argparse.Namespace) -> int:
    logs = Home.default().logs
    for option in ("follow", "request", "json") if args.workers else ():
        if getattr(args, option):
            raise Usage(f"logs --workers takes no --{option}")
    if args.workers:
        return _workers(logs, args.lines)
    path = logs / "kvd.log"
    with _opened(path) as file:
        kept: deque[str] = deque((line for line in file if _wanted(line, args.request)), maxlen=args.lines)
        for line in kept:
            _show(line, args.json)
        if args.request and args.lines and not kept and not args.follow:
            raise BadRequest(f"no line of request {args.request!r} in {path}", request=args.request)
        if args.follow:
            for line in follow(file, path):
                if _wanted(line, args.request):
                    _show(line, args.json)
    return 0


def _opened(path: Path) -> IO[str]:
    try:
        return path.open(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise BadRequest(f"no log yet: {path} is written by `kvd serve`", path=str(path)) from None
    except OSError as problem:
        raise BadRequest(f"cannot read {path}: {problem.strerror}", path=str(path)) from None


def follow(file: IO[str], path: Path) -> Iterator[str]:
    """Lines as they are appended, across a rotation (the path names another file then)."""
    while True:
        if line := file.readline():
            yield line
            continue
        sys.stdout.flush()
        time.sleep(_POLL_S)
        if path.exists() and not path.samefile(f"/dev/fd/{file.fileno()}"):
            with path.open(encoding="utf-8", errors="replace") as renewed:
                yield from follow(renewed, path)


def readable(line: str) -> str:
    """`2026-11-30 12:00:00 info  event  key=value …`; a line that is not JSON stays as it is."""
    try:
        fields = json.loads(line)
    except ValueError:
        return line.rstrip("\n")
    when = str(fields.pop("timestamp", ""))[:19].replace("T", " ")
    level, event = str(fields.pop("level", "")), str(fields.pop("event", ""))
    return f"{when} {level:<7} {event}" + "".join(f"  {name}={_short(value)}" for name, value in fields.items())


def _short(value: object) -> object:
    """Seconds and ratios to a thousandth; --json has them in full."""
    return round(value, 3) if isinstance(value, float) else value


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of lines")
    return int(text)


def _wanted(line: str, request: str | None) -> bool:
    return request is None or request in line


def _show(line: str, raw: bool) -> None:
    print(line.rstrip("\n") if raw else readable(line))


def _workers(logs: Path, count: int) -> int:
    for path in sorted(logs.glob("worker-*.log"), key=lambda file: file.stat().st_mtime):
        print(f"── {path.name}")
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in deque(file, maxlen=count):
                print(line.rstrip("\n"))
    return 0
