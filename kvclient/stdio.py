"""Standard input, output and error of `kv`, by descriptor: nothing is left in a buffer that the interpreter would
flush into a closed pipe at its end."""

from __future__ import annotations

import errno
import os
import select
import stat
from typing import Final

STDIN: Final = 0
STDOUT: Final = 1
STDERR: Final = 2


class StdoutClosed(Exception):
    """Whoever read the output is gone (`| head`)."""


def write(text: str) -> None:
    """All of it, at once. Raises StdoutClosed, or OSError for anything else (disk full)."""
    rest = memoryview(text.encode())
    while rest:
        try:
            rest = rest[os.write(STDOUT, rest):]
        except BlockingIOError:
            select.select([], [STDOUT], [])
        except OSError as problem:
            if problem.errno in (errno.EPIPE, errno.ECONNRESET):
                raise StdoutClosed from None
            raise


def check_stdout() -> None:
    """Raises StdoutClosed when the reader is gone, without writing: for the time before the first token.

    macOS tells it only to those who ask for something, and of a pipe may say that there is no such descriptor."""
    try:
        pipe = stat.S_ISFIFO(os.fstat(STDOUT).st_mode)
    except OSError:
        return  # it was closed from the start: who writes is told
    gone = select.POLLERR | select.POLLHUP | (select.POLLNVAL if pipe else 0)
    poller = select.poll()
    poller.register(STDOUT, select.POLLOUT)
    if any(state & gone for _, state in poller.poll(0)):
        raise StdoutClosed


def terminal() -> bool:
    """Somebody reads the answer as it comes."""
    return os.isatty(STDOUT)


def complain(line: str) -> None:
    error(f"kv: {' '.join(line.split())}\n")


def error(text: str) -> None:
    """To stderr; nobody can be told if that is closed too."""
    try:
        os.write(STDERR, text.encode(errors="replace"))
    except OSError:
        return


def read_document() -> str:
    """What was piped or redirected in, "" from a terminal or a closed stdin. Raises BadRequest if it is not UTF-8 or
    larger than a request may be."""
    try:
        if os.isatty(STDIN):
            return ""
        return _decode(_read())
    except OSError as problem:
        if problem.errno == errno.EBADF:
            return ""
        from kvclient.errors import BadRequest

        raise BadRequest(f"cannot read stdin: {problem.strerror}") from None


def _read() -> bytes:
    from kvclient.errors import BadRequest
    from kvclient.wire import MAX_BODY

    with open(STDIN, "rb", closefd=False) as source:
        data = source.read(MAX_BODY + 1)
    if len(data) > MAX_BODY:
        raise BadRequest(f"stdin has more than {MAX_BODY} bytes, the most that can be sent", limit=MAX_BODY)
    return data


def _decode(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as problem:
        from kvclient.errors import BadRequest

        byte = data[problem.start]
        raise BadRequest(
            f"stdin is not UTF-8: byte 0x{byte:02x} at offset {problem.start}", offset=problem.start
        ) from None
