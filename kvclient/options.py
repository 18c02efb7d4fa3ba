"""The command line of `kv`: what it takes and how it explains itself."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvclient import __version__, fields, stdio
from kvclient.errors import BadRequest
from kvclient.parser import Parser

SHELLS: Final = ("bash", "zsh", "fish")

DESCRIPTION = """\
Ask a local language model from the shell. What is piped in comes first, then a blank line, then PROMPT, so that
several questions about one document share its work: only the first one reads it.
"""
EXAMPLES = """\
examples:
  kv "three names for a cat"
  git diff | kv "write a commit message"
  kv "what does chapter 3 claim?" < book.txt        reads the book once …
  kv "and chapter 4?" < book.txt                    … and starts at once
  kv -s "You are a terse reviewer." -n 300 < patch.diff
  kv --raw -t 0 -n 20 "The capital of France is"    continue a text, no chat template
  kv --json "hi" | jq .stats                        text and figures as JSON
  kv -m demo --stats "hi" > answer.txt              figures on stderr
  eval "$(kv --completion bash)"                    completion (also zsh, fish)

environment:
  KV_MODEL       the model, when -m is not given
  KVD_HOME       where the daemon lives          KVD_SOCKET     its socket
  KVD_AUTOSTART  1: start the daemon if none runs

exit codes:
  0 done    2 usage    65 bad input    69 no daemon    70 internal error    75 busy or over time, try again
  130 interrupted    141 stdout closed; both cancel the request
"""


@dataclass(frozen=True, slots=True)
class Asked:
    """One command line. `options` are checked fields of `generate`; `completion` names a shell."""

    prompt: str
    model: str
    system: str | None
    options: dict[str, Any]
    raw: bool
    prompt_first: bool
    json: bool
    stats: bool
    completion: str | None


class Quiet(Parser):
    """Writes by descriptor, so that `kv --help | head -1` ends quietly."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if message:
            (stdio.write if file is sys.stdout else stdio.error)(message)


def parser() -> Quiet:
    made = Quiet(
        "kv", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="kv [options] [PROMPT …] [< DOCUMENT]", allow_abbrev=False,
    )  # fmt: skip
    add = made.add_argument
    add("prompt", nargs="*", metavar="PROMPT", help="the question; several words are joined by blanks")
    add("-m", "--model", metavar="MODEL", help="default: $KV_MODEL, else the daemon's default")
    add("-s", "--system", metavar="TEXT", help="system message")
    add("-n", "--max-tokens", type=int, metavar="N", help="longest answer in tokens (default: a full context)")
    add("-t", "--temperature", type=float, metavar="T", help="default 0: the likeliest token each time; 1 lets it vary")
    add("--prompt-first", action="store_true", help="PROMPT before the document (shares less)")
    add("--raw", action="store_true", help="no chat template: the text is continued as it is")
    add("--json", action="store_true", help="one JSON object at the end: text, finish_reason, stats")
    add("--stats", action="store_true", help="figures of the request, and the model's warnings, on stderr")
    add("--timeout", type=float, metavar="S", help="give up after S seconds; work done is kept for the next try")
    add("--seed", type=int, metavar="N", help="the same draws again for the same N (default: random)")
    add("--top-p", type=float, metavar="P", help="draw from the likeliest tokens that make up P (default 1: all)")
    add("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens (default 0: all)")
    add("--min-p", type=float, metavar="P", help="leave out what is less likely than P times the likeliest (default 0)")
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    add("--cache", choices=("use", "read", "off"), help="default use; read: store nothing new; off: neither")
    add("--background", action="store_true", help="let interactive requests go first")
    add("--completion", choices=SHELLS, metavar="SHELL", help="print a completion script: bash, zsh or fish")
    add("--version", action="version", version=f"kv {__version__}")
    return made


def parse(words: Sequence[str]) -> Asked:
    """Raises SystemExit (with argparse's message written) or BadRequest for a value out of range."""
    given = list(words)
    end = given.index("--") if "--" in given else len(given)
    got = parser().parse_intermixed_args(given[:end])
    if got.raw and got.system is not None:
        raise BadRequest("--raw has no chat template, so -s has no place")
    options = {
        "max_tokens": got.max_tokens, "temperature": got.temperature, "timeout": got.timeout, "seed": got.seed,
        "top_p": got.top_p, "top_k": got.top_k, "min_p": got.min_p, "stop": got.stop, "cache": got.cache,
        "priority": "background" if got.background else None,
    }  # fmt: skip
    checked = fields.checked("generate", {**options, "prompt": ""})
    del checked["prompt"]
    prompt = " ".join([*got.prompt, *given[end + 1:]])
    for name, text in (("PROMPT", prompt), ("-s", got.system or "")):
        fields.string()(name, text)
    return Asked(
        prompt, got.model or os.environ.get("KV_MODEL", ""), got.system, checked, got.raw, got.prompt_first, got.json,
        got.stats, got.completion,
    )  # fmt: skip


def idle(options: Mapping[str, Any]) -> list[str]:
    """Flags among `options` that have no effect, since nothing is drawn at temperature 0."""
    if options.get("temperature"):
        return []
    return [f"--{name.replace('_', '-')}" for name in fields.RANDOM if name in options]
