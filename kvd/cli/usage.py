"""Command lines that argparse takes and that make no sense all the same."""

from __future__ import annotations


class Usage(Exception):
    """One line about it; `kvd` ends with 2."""
