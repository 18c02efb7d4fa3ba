"""The daemon's log: JSON lines in a rotated file, readable lines on a terminal. Never prompt text."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, MutableMapping
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import structlog

Log = structlog.stdlib.BoundLogger
logger: Log = structlog.stdlib.get_logger("kvd")

FILE = "kvd.log"
MAX_BYTES = 8 * 1024 * 1024
KEPT = 4

Processor = Callable[[Any, str, MutableMapping[str, Any]], Any]


def start(folder: Path, level: str) -> None:
    """Log to `folder`/kvd.log, and to stderr if it is a terminal (in the background warnings only)."""
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level, structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level, structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info, structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )  # fmt: skip
    file = RotatingFileHandler(folder / FILE, maxBytes=MAX_BYTES, backupCount=KEPT, encoding="utf-8", delay=True)
    root = logging.getLogger("kvd")
    stop()
    root.propagate = False
    _add(root, file, structlog.processors.JSONRenderer())
    if sys.stderr.isatty():
        screen = logging.StreamHandler()
        screen.addFilter(lambda record: record.levelno >= logging.WARNING or _in_front())
        _add(root, screen, structlog.dev.ConsoleRenderer())
    set_level(level)


def _in_front() -> bool:
    """Whether the terminal is ours; after `kvd serve &` it belongs to the answers of `kv`."""
    try:
        return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except OSError:  # a terminal that controls nobody
        return True


def set_level(level: str) -> None:
    logging.getLogger("kvd").setLevel(level.upper())


def stop() -> None:
    root = logging.getLogger("kvd")
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()


def _add(root: logging.Logger, handler: logging.Handler, renderer: Processor) -> None:
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer]
        )
    )
    root.addHandler(handler)
