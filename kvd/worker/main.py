"""`python -P -m kvd.worker.main`: the process of one loaded model. The front starts it, see `kvd.front.spawn`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from kvclient.errors import Internal, KvdError, OutOfMemory
from kvd import leash
from kvd.messages import Failed, Ready
from kvd.models.load import import_mlx_lm
from kvd.worker.beat import Heart
from kvd.worker.link import Link
from kvd.worker.outbox import Outbox
from kvd.worker.service import Growth, Service

FLUSH_S: Final = 5.0
"""how long a stop waits for blocks on their way to the disk"""
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Options:
    """The command line. Sizes in bytes, block and chunk in tokens."""

    connect: Path
    home: Path
    model: Path
    name: str
    store: Path
    leash: int
    kv: str
    block_size: int
    pool_limit: int
    pool_initial: int
    weights_limit: int | None
    chunk: int | None


def options(arguments: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser("kvd.worker.main", description=__doc__)
    for name in ("connect", "home", "model", "store"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--kv", default="native")
    for name in ("leash", "block-size", "pool-limit", "pool-initial"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--weights-limit", type=int)
    parser.add_argument("--chunk", type=int)
    return Options(**vars(parser.parse_args(arguments)))


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(sys.argv[1:] if arguments is None else arguments)
    leash.hold(given.leash)
    os.umask(0o077)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the front, which then stops us
    structlog.configure(
        processors=[
            structlog.processors.TimeStamper("iso"), structlog.processors.add_log_level,
            structlog.processors.format_exc_info, structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )  # fmt: skip
    outbox = Outbox()
    growth = Growth(outbox)
    service = Service(outbox, growth)
    link = Link(f"ipc://{given.connect}", outbox, service.receive)
    heart = Heart(outbox)
    link.start()
    heart.start()
    try:
        return _serve(given, outbox, growth, service, heart)
    except KvdError as problem:
        outbox.tell(Failed.of(problem))
        return 1
    except MemoryError as problem:
        outbox.tell(Failed.of(OutOfMemory(f"loading {given.name}: {problem}", what="weights")))
        return 1
    except Exception as problem:  # the border of the process: the front is told, the log has the rest
        log.error("load failed", exc_info=problem)
        outbox.tell(Failed.of(Internal(f"loading {given.name} failed: {type(problem).__name__}: {problem}"[:300])))
        return 1
    finally:
        heart.stop()
        service.close()
        link.close(FLUSH_S)


def _serve(given: Options, outbox: Outbox, growth: Growth, service: Service, heart: Heart) -> int:
    """Load and run, in this thread: MLX wants both in one."""
    import_mlx_lm()
    from kvd.worker.assemble import assemble

    began = time.monotonic()
    built = assemble(given, outbox, growth, heart)
    service.open(built.engine, built.prompter)
    signal.signal(signal.SIGTERM, lambda *_: built.engine.stop(0.0))
    log.info("ready", model=given.name, seconds=round(time.monotonic() - began, 3), pid=os.getpid())
    outbox.tell(Ready(built.info | built.engine.stats()))
    built.engine.run()
    built.engine.close(FLUSH_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
