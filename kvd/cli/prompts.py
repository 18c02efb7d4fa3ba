"""The input of `warm` and `explain`: what `kv` would send for these files as stdin, up to where a question starts."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from kvclient import compose
from kvclient.errors import BadRequest


def add_arguments(parser: argparse.ArgumentParser, files: str) -> None:
    parser.add_argument("model", help="name, as `kvd models` lists it")
    parser.add_argument("files", nargs=files, metavar="FILE", help="the document; several are joined; - is stdin")
    parser.add_argument("-s", "--system", metavar="TEXT", help="system text, as in `kv -s`")
    parser.add_argument("--raw", action="store_true", help="no chat template, as in `kv --raw`")


def body_of(files: list[str], system: str | None, raw: bool) -> dict[str, Any]:
    """Fields of the request. Raises BadRequest for an unreadable or non-UTF-8 file, and for nothing to read."""
    document = "".join(read(file) for file in files)
    if not document and not system:
        raise BadRequest("nothing to read: give a file that is not empty, or --system")
    if raw and system:
        raise BadRequest("--raw takes no --system: there is no chat template to place it")
    return compose.warm_body(document, system, raw=raw)


def read(file: str) -> str:
    """Text of a file, or of stdin for "-". Raises BadRequest naming the file and, for bad text, the byte."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return data.decode()
    except UnicodeDecodeError as problem:
        raise BadRequest(f"{file} is not UTF-8 (byte {problem.start})", file=file, position=problem.start) from None
    except OSError as problem:
        raise BadRequest(f"{file}: {problem.strerror}", file=file) from None
