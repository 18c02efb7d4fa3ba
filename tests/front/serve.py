"""The real daemon with the fake worker: `python -m tests.front.serve HOME [section.key=value …]`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from kvclient.errors import KvdError
from kvd.config import LEAST, load
from kvd.front.app import Parts, serve

FAKE = Path(__file__).with_name("fake_worker.py")


def preload(home: Path) -> None:
    """Looking for the library takes until the file is gone."""
    while (home / "hold-preload").exists():
        time.sleep(0.01)


def main() -> int:
    LEAST.clear()  # models of some bytes, limits to match
    home, *flags = sys.argv[1:]
    config = load(Path(home), flags=dict(flag.split("=", 1) for flag in flags))
    parts = Parts(command=(sys.executable, str(FAKE)), preload=preload)
    try:
        return serve(config, parts)
    except KvdError as problem:
        print(problem.message, file=sys.stderr)
        return problem.exit_code


if __name__ == "__main__":
    sys.exit(main())
