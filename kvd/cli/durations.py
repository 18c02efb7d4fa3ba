"""Durations as argparse types."""

from __future__ import annotations

import argparse

from kvd.units import parse_duration


def duration(text: str) -> float:
    """Seconds, above 0; for `type=`."""
    try:
        seconds = parse_duration(text)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None
    if seconds <= 0:
        raise argparse.ArgumentTypeError("must be more than 0")
    return seconds
