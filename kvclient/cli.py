"""`kv`, the shell helper: stdin and a question to the daemon, tokens to stdout as they come.

Hardly anything is imported before `main` runs: until then Ctrl-C ends in a traceback.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvclient.errors import KvdError
    from kvclient.options import Asked

USAGE, INTERNAL, INTERRUPTED, CLOSED = 2, 70, 130, 141
"""Exit codes beside those that the errors carry (`kvclient.errors`)."""


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit code; raises nothing that a user could cause."""
    try:
        return _main(list(sys.argv[1:] if words is None else words))
    except KeyboardInterrupt:
        return INTERRUPTED


def _main(words: list[str]) -> int:
    from kvclient import __version__
    from kvclient.stdio import StdoutClosed, complain, write

    try:
        if words == ["--version"]:
            write(f"kv {__version__}\n")
            return 0
        if words == ["--completion", "names"]:  # each Tab asks: without the parser
            from kvclient.names import listing

            write(listing("names"))
            return 0
        return _run(words)
    except StdoutClosed:
        return CLOSED
    except OSError as problem:
        complain(f"cannot write the answer: {problem.strerror or problem}")
        return INTERNAL


def _run(words: list[str]) -> int:
    from kvclient import options
    from kvclient.errors import BadRequest, KvdError
    from kvclient.stdio import complain, write

    try:
        asked = options.parse(words)
    except SystemExit as left:
        return int(left.code or 0)
    except BadRequest as problem:
        return _usage(problem)
    if asked.completion is not None:
        from kvclient import completions

        write(completions.script(asked.completion))
        return 0
    try:
        return _ask(asked)
    except KvdError as problem:
        complain(problem.message)
        return problem.exit_code


def _usage(problem: KvdError) -> int:
    from kvclient.stdio import complain

    complain(f"{problem.message}; see `kv --help`")
    return USAGE


def _ask(asked: Asked) -> int:
    from kvclient import compose, options, stdio

    document = stdio.read_document()
    if not document and not asked.prompt:
        stdio.error(options.parser().format_usage())
        stdio.complain("nothing to ask: no prompt was given and nothing was piped in; see `kv --help`")
        return USAGE
    if idle := options.idle(asked.options):
        stdio.complain(f"no effect at temperature 0: {', '.join(idle)}; add -t 1")
    content = compose.text(document, asked.prompt, prompt_first=asked.prompt_first)
    body = {"prompt": content} if asked.raw else {"messages": compose.messages(content, asked.system)}

    from kvclient.answer import answer

    return answer(asked, body)
