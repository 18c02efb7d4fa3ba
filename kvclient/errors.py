"""What can go wrong, as types that carry the numbers that tripped.

The same errors travel over RPC, Python, the shell (exit code and one line) and HTTP:

    KvdError
    ├── BadRequest              65 / 400   a field of the request is missing, unknown or out of range
    │   ├── UnknownModel        65 / 404
    │   └── ContextLengthExceeded 65 / 400
    ├── UnsupportedModel        65 / 400   an architecture or file that cannot be served, by name
    ├── ProtocolError           70 / 400   versions or frames that do not fit
    ├── Unreachable             69 / 503   no daemon, or it went away
    ├── Busy                    75 / 429   admission control: try again
    ├── OutOfMemory             75 / 507   weights, pool or request over the budget, with both numbers; 65 / 400 where
    │                                      it would not fit alone either: to ask again is useless
    ├── StoreError              70 / 500   the store refuses (damaged, held by another, full)
    ├── WorkerLost              70 / 502   the model's process died or hung; the next request respawns it
    ├── Timeout                 75 / 504   the request's own time limit
    ├── Cancelled              130 / 499
    └── Internal                70 / 500

Each is `(exit code of `kv` / HTTP status)`.
"""

from __future__ import annotations

from typing import Any, ClassVar


class KvdError(Exception):
    """Base of all errors. `details` holds plain numbers and strings, the same on every side."""

    code: ClassVar[str] = "internal"
    exit_code: int = 70
    http_status: int = 500

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def to_wire(self) -> dict[str, Any]:
        """Body of an `error` reply."""
        return {"code": self.code, "message": self.message, "details": self.details}


class BadRequest(KvdError):
    code, exit_code, http_status = "bad_request", 65, 400


class UnknownModel(BadRequest):
    """details: model, known (names), alias_of (the model that an alias names)."""

    code, http_status = "unknown_model", 404


class ContextLengthExceeded(BadRequest):
    """details: prompt, limit, reusable_prefix (tokens)."""

    code = "context_length_exceeded"


class UnsupportedModel(KvdError):
    """details: architecture or file, reason."""

    code, exit_code, http_status = "unsupported_model", 65, 400


class ProtocolError(KvdError):
    """details: theirs, ours (versions) or limit, size (bytes)."""

    code, http_status = "protocol", 400


class Unreachable(KvdError):
    """details: socket."""

    code, exit_code, http_status = "unreachable", 69, 503


class Busy(KvdError):
    """details: waiting, limit (requests)."""

    code, exit_code, http_status = "busy", 75, 429


class OutOfMemory(KvdError):
    """details: needed, available (bytes), what; where it is known also budget (bytes), all there could ever be."""

    code, exit_code, http_status = "out_of_memory", 75, 507

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message, **details)
        needed, budget = details.get("needed"), details.get("budget")
        if isinstance(needed, int) and isinstance(budget, int) and needed > budget:
            self.exit_code, self.http_status = BadRequest.exit_code, BadRequest.http_status


class StoreError(KvdError):
    code = "store"


class WorkerLost(KvdError):
    """details: model, reason ("exit", "signal", "hang"), log (path of its stderr)."""

    code, http_status = "worker_lost", 502


class Timeout(KvdError):
    """details: limit_s, stage."""

    code, exit_code, http_status = "timeout", 75, 504


class Cancelled(KvdError):
    code, exit_code, http_status = "cancelled", 130, 499


class Internal(KvdError):
    pass


def _tree(root: type[KvdError]) -> dict[str, type[KvdError]]:
    """By code; a subclass without a code of its own is its parent on the other side."""
    found = {root.code: root} if root is not KvdError else {}
    for child in root.__subclasses__():
        found = _tree(child) | found
    return found


def from_wire(body: dict[str, Any]) -> KvdError:
    """Rebuild the error of an `error` reply; an unknown code becomes Internal with that code in details."""
    kind = _tree(KvdError).get(str(body.get("code")))
    details = dict(body.get("details") or {})
    message = str(body.get("message") or "unknown error")
    if kind is None:
        return Internal(message, **{**details, "code": body.get("code")})
    return kind(message, **details)
