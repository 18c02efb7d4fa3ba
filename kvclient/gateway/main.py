"""`kv-gateway`: the command."""

from __future__ import annotations

import argparse
import errno
import socket
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from kvclient import __version__, paths
from kvclient.descriptors import raise_limit
from kvclient.errors import BadRequest, KvdError
from kvclient.gateway.auth import Guard, is_loopback
from kvclient.gateway.settings import DEFAULT_MAX_BODY, DEFAULT_MAX_REQUESTS, EVERY_MODEL, Settings
from kvclient.gateway.volatile import RULES, Rule, rules_named
from kvclient.parser import USAGE, Parser

INTERRUPTED: Final = 130
DRAIN_S: Final = 10
"""How long a stop waits for replies in progress."""
KEEP_ALIVE_S: Final = 75
"""How long a connection may idle: longer than clients keep theirs, or one asks on a connection that is just closed."""
DESCRIPTION: Final = """\
OpenAI- and Anthropic-compatible HTTP for the kvd daemon. Defaults come from [gateway] in kvd.toml. GET / is a page with
plots, GET /metrics is for Prometheus.
"""
EXAMPLES: Final = """\
examples:
  kv-gateway &
  OPENAI_BASE_URL=http://127.0.0.1:8471/v1 my-agent
  ANTHROPIC_BASE_URL=http://127.0.0.1:8471 my-agent
  kv-gateway --volatile 'demo=date,session'        keep what changes daily from ending the prefix
  kv-gateway --host 0.0.0.0 --api-key-file keys    for other machines
"""


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        options = _parser().parse_args(arguments)
        given = _from_file(paths.home() / "kvd.toml")
        host = str(options.host or given.get("host") or "127.0.0.1")
        port = int(options.port if options.port is not None else given.get("port", 8471))
        settings = _settings(options, given)
        if not settings.guard.keys and not is_loopback(host):
            raise BadRequest(f"refusing to listen on {host} without --api-key: anybody who reaches it could use it")
        return _serve(host, port, settings)
    except BadRequest as problem:
        print(f"kv-gateway: {problem.message}", file=sys.stderr)
        return USAGE
    except KvdError as problem:
        print(f"kv-gateway: {problem.message}", file=sys.stderr)
        return problem.exit_code
    except KeyboardInterrupt:  # uvicorn has stopped in order and raises the signal again
        return INTERRUPTED


def _parser() -> Parser:
    rules = ", ".join(f"{rule.name} ({rule.action.value})" for rule in RULES.values())
    parser = Parser(
        prog="kv-gateway", formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        description=DESCRIPTION, epilog=f"rules for --volatile: {rules}\n\n{EXAMPLES}",
    )  # fmt: skip
    parser.add_argument("--host", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="port (8471; 0: any free one, printed)")
    parser.add_argument(
        "--api-key", action="append", default=[], metavar="KEY",
        help="clients must send one of these; each has a cache of its own. Needed for anything but loopback",
    )
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="keys, one a line: keeps them out of the process list"
    )
    parser.add_argument(
        "--cors-origin", action="append", default=[], metavar="ORIGIN", help="let web pages of this origin call (none)"
    )
    parser.add_argument(
        "--volatile", action="append", default=[], metavar="MODEL=RULE,…",
        help="move or blank text near the top of MODEL's system prompts that keeps changing, under its aliases too "
        "('*': any model); off",
    )
    parser.add_argument(
        "--max-body", type=int, default=DEFAULT_MAX_BODY, metavar="BYTES", help="largest request (32 MiB)"
    )
    parser.add_argument(
        "--max-requests", type=int, default=DEFAULT_MAX_REQUESTS, metavar="N",
        help=f"generations at once ({DEFAULT_MAX_REQUESTS})",
    )
    parser.add_argument("--version", action="version", version=f"kv-gateway {__version__}")
    return parser


def _from_file(path: Path) -> dict[str, Any]:
    """[gateway] of the daemon's configuration; the daemon checks its keys."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as problem:
        raise BadRequest(f"{path} cannot be read: {problem}") from None
    try:
        table = tomllib.loads(text).get("gateway", {})
    except tomllib.TOMLDecodeError as problem:
        raise BadRequest(f"{path}: {problem}") from None
    if not isinstance(table, dict):
        raise BadRequest(f"{path}: [gateway] must be a table")
    return table


def _settings(options: argparse.Namespace, given: dict[str, Any]) -> Settings:
    keys = [*options.api_key, *_keys(options.api_key_file)]
    if not keys and given.get("api_key"):
        keys = [str(given["api_key"])]
    if any(not key.strip() for key in keys):
        raise BadRequest("an API key must not be empty")
    if options.max_body < 1 or options.max_requests < 1:
        raise BadRequest("--max-body and --max-requests must be at least 1")
    rules = dict(_volatile(item) for item in options.volatile)
    _tell_strangers(rules)
    return Settings(Guard(keys, options.cors_origin), rules, options.max_body, options.max_requests)


def _keys(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as problem:
        raise BadRequest(f"{path} cannot be read: {problem}") from None
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        raise BadRequest(f"{path} holds no key")
    return found


def _volatile(item: str) -> tuple[str, list[Rule]]:
    model, equals, names = item.partition("=")
    if not (model and equals and names):
        raise BadRequest(f"--volatile is MODEL=RULE,RULE, got {item!r}")
    return model, rules_named(name.strip() for name in names.split(","))


def _tell_strangers(named: Iterable[str]) -> None:
    """Models that are named but not here: they may be pulled later, or be misspelt."""
    here = sorted(folder.name for folder in (paths.home() / "models").glob("[!.]*"))
    for name in sorted(set(named) - {EVERY_MODEL, *here}) if here else ():
        print(f"kv-gateway: --volatile: there is no model {name!r} yet, only {', '.join(here)}", file=sys.stderr)


def _serve(host: str, port: int, settings: Settings) -> int:
    """Listen until told to stop. The line with the address is printed when connections are taken."""
    try:
        import uvicorn

        from kvclient.aio import AsyncClient
        from kvclient.gateway.app import build
    except ModuleNotFoundError as missing:
        raise BadRequest(f"the gateway needs {missing.name}: install kvd with its extra `http`") from None

    raise_limit()
    listener = _listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    print(f"kv-gateway: http://{shown}:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(
        build(AsyncClient(), settings), log_level="warning", access_log=False, server_header=False,
        timeout_graceful_shutdown=DRAIN_S, timeout_keep_alive=KEEP_ALIVE_S, lifespan="on", http="h11",
    )
    with listener:
        uvicorn.Server(config).run(sockets=[listener])
    return 0


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:  # Linux would wrap it
        raise BadRequest(f"a port is 0 to 65535, got {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as problem:
        if problem.errno == errno.EADDRINUSE:
            raise BadRequest(f"port {port} of {host} is in use; take another with --port") from None
        raise BadRequest(f"cannot listen on {host} port {port}: {problem}") from None
    return listener


if __name__ == "__main__":
    sys.exit(main())
