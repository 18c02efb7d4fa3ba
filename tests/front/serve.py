"""The real daemon with the fake worker: `python -m tests.front.serve HOME [section.key=value …]`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from kvclient.errors import KvdError
from kvd.config import LEAST, load
from kvd.front.app import Parts, serve

FAKE = Path(__file__).with_name("fake_worker.py")
HUNG = "hung"
"""a link in the home: what it leads to lies on a disk that hangs, for every thread, until the link is gone"""
_stat = os.stat


def preload(home: Path) -> None:
    """Looking for the library takes until the file is gone."""
    while (home / "hold-preload").exists():
        time.sleep(0.01)


def _hang(home: str) -> None:
    def wait(path: Any) -> None:
        while isinstance(path, str | os.PathLike) and os.fspath(path).startswith(_hung(home)):
            time.sleep(0.01)

    def stat(path: Any, **options: Any) -> os.stat_result:
        wait(path)
        return _stat(path, **options)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir"):
            wait(args[0])

    os.stat = stat
    sys.addaudithook(hook)


def _hung(home: str) -> tuple[str, ...]:
    """Of folders that hang, and none while the link is not there."""
    try:
        return (os.readlink(f"{home}/{HUNG}"),)
    except FileNotFoundError:
        return ()


def main() -> int:
    LEAST.clear()  # models of some bytes, limits to match
    home, *flags = sys.argv[1:]
    _hang(home)
    config = load(Path(home), flags=dict(flag.split("=", 1) for flag in flags))
    parts = Parts(command=(sys.executable, str(FAKE)), preload=preload)
    try:
        return serve(config, parts)
    except KvdError as problem:
        print(problem.message, file=sys.stderr)
        return problem.exit_code


if __name__ == "__main__":
    sys.exit(main())
