"""Refusals that HTTP adds to the daemon's errors, and how any error looks to the client that asked."""

from __future__ import annotations

import json
from typing import Any, Final

from starlette.types import Scope

from kvclient.errors import Busy, KvdError, OutOfMemory
from kvclient.gateway.anthropic.errors import error_body as anthropic_body
from kvclient.gateway.metrics import KNOWN_PATHS
from kvclient.gateway.openai.errors import error_body as openai_body

CRASH_LOOP: Final = "crash_loop"
"""the reason of a WorkerLost whose model stays down until somebody loads it"""


class Refused(KvdError):
    """A request that never reaches the daemon. details: status (HTTP), code."""

    code, exit_code, http_status = "refused", 65, 400


def refused(status: int, code: str, message: str, **details: Any) -> Refused:
    return Refused(message, status=status, code=code, **details)


def not_found(path: str) -> Refused:
    near = path.removeprefix("/v1") if path.startswith("/v1/v1/") else f"/v1{path}"
    hint = f"; check the base URL: {near} is" if near in KNOWN_PATHS else ""
    return refused(404, "not_found", f"there is no {path} here{hint}", path=path)


def status_of(problem: KvdError) -> int:
    return int(problem.details["status"]) if isinstance(problem, Refused) else problem.http_status


def speaks_anthropic(scope: Scope) -> bool:
    path: str = scope["path"]
    return path.startswith("/v1/messages") or any(name == b"anthropic-version" for name, _ in scope["headers"])


def error_json(problem: KvdError, scope: Scope) -> bytes:
    """The body of an error reply in the shape of the API that the request belongs to."""
    status = status_of(problem)
    if speaks_anthropic(scope):
        return json.dumps(anthropic_body(problem, status, scope["state"]["id"]), ensure_ascii=False).encode()
    return json.dumps(openai_body(problem, status), ensure_ascii=False).encode()


def error_headers(problem: KvdError) -> list[tuple[bytes, bytes]]:
    if isinstance(problem, Busy | OutOfMemory) and problem.exit_code == Busy.exit_code:
        return [(b"retry-after", b"1")]
    if problem.details.get("reason") == CRASH_LOOP:  # the SDKs would repeat it, as every 5xx
        return [(b"x-should-retry", b"false")]
    if status_of(problem) == 401:
        return [(b"www-authenticate", b"Bearer")]
    return []
