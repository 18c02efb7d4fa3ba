"""Dispatch of `kvd VERB`. Only the asked verb's module is imported, so that `kvd status` never loads mlx.

Hardly anything is imported before `main` runs: until then Ctrl-C ends in a traceback.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

    from kvclient.parser import Parser

VERBS = {
    "serve": "run the daemon in the foreground",
    "start": "start it in the background, and wait until it answers",
    "stop": "stop the running daemon",
    "status": "what the daemon is doing",
    "doctor": "check this machine and say what to fix",
    "pull": "bring a model in: demo, a Hugging Face repo, a GGUF file or an MLX folder",
    "rm": "remove a model from the disk",
    "models": "models that are here, and which are loaded",
    "load": "load a model now",
    "unload": "give a model's memory back",
    "warm": "prefill a document or system text before it is asked about",
    "calibrate": "measure what KV precisions cost on a model, on real text",
    "cache": "look into the store of KV blocks and take care of it",
    "explain": "what of a prompt is cached, and where it diverges",
    "install": "start the daemon at login (launchd agent, systemd user unit)",
    "uninstall": "undo install",
    "top": "live view of requests, memory and reuse",
    "logs": "the daemon's log, and those of crashed workers",
    "config": "the configuration and where each value comes from",
}
USAGE = 2
INTERNAL = 70
INTERRUPTED = 130
PIPE_CLOSED = 141


def main(argv: list[str] | None = None) -> int:
    """Entry point of the `kvd` script. Returns the exit code; errors of users are one line on stderr."""
    _open_closed()
    words = sys.argv[1:] if argv is None else argv
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _discard()
        return PIPE_CLOSED
    except OSError as problem:
        print(f"kvd: {_line(problem)}", file=sys.stderr)
        return INTERNAL


def _open_closed() -> None:
    """A closed standard file is None for Python, and the next file opened would get its number. Writing to such a
    stdout fails as it would have; a closed stderr takes what nobody reads."""
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY), encoding="utf-8")
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")


def _line(problem: OSError) -> str:
    said = problem.strerror or str(problem)
    try:
        sys.stdout.flush()
    except OSError:
        _discard()
        return f"cannot write to stdout: {said}"
    return f"{problem.filename}: {said}" if problem.filename else said


def _discard() -> None:
    """What stdout did not take, or the interpreter complains while it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(words: list[str]) -> int:
    from kvclient.errors import KvdError
    from kvd.cli.usage import Usage

    try:
        return _dispatch(words)
    except KvdError as error:
        print(f"kvd: {error.message}", file=sys.stderr)
        return error.exit_code
    except Usage as error:
        print(f"kvd: {error}; see `kvd {words[0]} --help`", file=sys.stderr)
        return USAGE
    except SystemExit as left:  # argparse, after help or a complaint of its own
        return int(left.code or 0)


def parser_of(verb: str) -> Parser:
    """The verb's own parser, with its help."""
    import argparse

    from kvclient.parser import Parser

    module = _module(verb)
    parser = Parser(
        prog=f"kvd {verb}",
        description=(module.__doc__ or "").strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.configure(parser)
    return parser


def _module(verb: str) -> ModuleType:
    import importlib

    return importlib.import_module(f"kvd.cli.{verb}")


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        if len(words) > 1 and words[0] == "help":
            if words[1] not in VERBS:
                return _unknown(words[1])
            parser_of(words[1]).print_help()
            return 0
        print(_help(), file=sys.stdout if words else sys.stderr)
        return 0 if words else USAGE
    verb, rest = words[0], words[1:]
    if verb in ("-V", "--version"):
        from kvclient import __version__

        print(f"kvd {__version__}")
        return 0
    if verb == "--completion":
        from kvclient import names

        if len(rest) == 1 and rest[0] in names.ASKED:  # each Tab asks: without the parsers
            print(names.listing(rest[0]), end="")
            return 0
        from kvd.cli import completion

        return completion.print_script(rest)
    if verb not in VERBS:
        return _unknown(verb)
    module = _module(verb)
    return int(module.run(parser_of(verb).parse_intermixed_args(rest)))


def _unknown(verb: str) -> int:
    import difflib

    near = difflib.get_close_matches(verb, VERBS, n=1)
    print(f"kvd: no verb {verb!r}{f'; did you mean {near[0]}?' if near else ''} (see kvd --help)", file=sys.stderr)
    return USAGE


def _help() -> str:
    lines = [f"  {verb:<11}{summary}" for verb, summary in VERBS.items()]
    return "\n".join(
        [
            "usage: kvd VERB …        (kvd VERB --help explains one)",
            "",
            "kvd keeps language models loaded and their KV caches on disk, so that no prefix is computed twice.",
            "",
            *lines,
            "",
            "  --version, --completion bash|zsh|fish",
            "",
            "First steps:  kvd pull demo; kvd start",
            '              kv "explain this" < LICENSE        (kv asks the daemon; see kv --help)',
            "",
            "Environment:  KVD_HOME (models, store, logs, kvd.toml), KVD_SOCKET",
            "Exit codes:   0 done, 2 usage, 65 bad input, 69 no daemon, 70 internal, 75 busy, 130 interrupted",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
