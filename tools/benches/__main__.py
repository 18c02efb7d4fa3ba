"""`tools/bench [NAME…] [--json FILE]`: ratios against baselines measured in the same run."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

from benches.rows import Row, save, show

BENCHES = {
    "start": "kv --version, import of kvclient, front's start to its first status",
    "reuse": "time to first token: cold, repeated, restarted, last 10 % changed (demo model, real daemon)",
    "decode": "model step with the paged pool against mlx-lm's KVCache (demo model)",
    "attention": "one layer of decode attention: the path chosen against the fastest (where the borders come from)",
    "pool": "in-place updates: step time over pool sizes",
    "precision": "KV precisions: bytes and peak memory by preset, decode steps against mlx-lm's quantised cache",
    "storing": "prefill's CPU seconds with the store on and off",
    "store": "restore, commit, lookup, start-up with 10,000 shards",
    "batch": "aggregate tokens/s of mixed and sharing requests against mlx-lm's BatchGenerator",
    "gap": "inter-token gap of a stream while a long prompt prefills",
    "soak": "2,000 short requests with cancels: memory, descriptors and blocks left over",
    "gateway": "added time to first token and per streamed token over HTTP",
    "gpu": "an NVIDIA GPU: reuse, decode and sharing at 32K tokens, Llama-3-8B shape (only when named)",
    "idle": "CPU use of the daemon at rest with a model loaded",
}
"""Each is a module of this package with `run() -> list[Row]`."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all but gpu")
    parser.add_argument("--list", action="store_true", help="name the benches and what they measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    options = parser.parse_args()
    if options.list:
        for name, what in BENCHES.items():
            print(f"{name:10} {what}")
        return 0
    if unknown := set(options.names) - set(BENCHES):
        parser.error(f"unknown bench: {', '.join(sorted(unknown))}; --list names them")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    rows: list[Row] = []
    for name in options.names or (name for name in BENCHES if name != "gpu"):
        print(f"{name}: {BENCHES[name]} …", file=sys.stderr, flush=True)
        found: list[Row] = importlib.import_module(f"benches.{name}").run()
        show(found, name)
        rows.extend(found)
    if options.json:
        save(rows, options.json)
    missed = [r.name for r in rows if r.ok is False]
    if missed:
        print(f"{len(missed)} bars missed: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
