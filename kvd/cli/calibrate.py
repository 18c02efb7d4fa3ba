"""Measure KV precisions of a model on real text.

Per preset: bytes per token, KL divergence and same-top-token rate against native KV; keys and values apart; which
layers are sensitive. The result is stored with the model, and `kvd load MODEL --kv auto` uses it.

  kvd calibrate demo
  kvd calibrate demo --text book.txt --json FILE
"""

from __future__ import annotations

import argparse
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="name, as `kvd models` lists it")
    parser.add_argument("--text", type=Path, metavar="FILE", help="text to measure on (default: kvd's own)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there as JSON")


def run(args: argparse.Namespace) -> int:
    from kvd.calibrate.verb import run as calibrate

    return calibrate(args.model, text=args.text, json=args.json)
