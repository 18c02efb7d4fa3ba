"""The tests' fake daemon as a process: answers `generate` with `max_tokens` words, as fast as it can."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from tests.gateway.fake import FakeDaemon, Step, done, words


def script(body: dict[str, Any], model: str) -> Iterator[Step]:
    yield "queued", {"position": 0}
    yield "progress", {"done": 30, "total": 40, "cached": 30}
    for word in words(body["max_tokens"]):
        yield "text", {"text": word, "index": 0}
    yield "finish", {"index": 0, "finish_reason": "length"}
    yield done("", "length")


def main() -> None:
    """Prints its socket, serves until stdin ends."""
    with FakeDaemon(script) as daemon:
        print(daemon.socket, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
