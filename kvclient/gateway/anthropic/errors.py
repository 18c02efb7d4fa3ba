"""Errors in Anthropic's shape."""

from __future__ import annotations

from typing import Any, Final

from kvclient.errors import KvdError

TYPES: Final = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
    504: "timeout_error",
}


def error_body(problem: KvdError, status: int, request_id: str) -> dict[str, Any]:
    """`{"type": "error", "error": {type, message, details}, "request_id"}`; `details`: the numbers that tripped."""
    details = {key: value for key, value in problem.details.items() if key != "status"}
    error: dict[str, Any] = {
        "type": TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error"),
        "message": problem.message,
    }
    if details:
        error["details"] = details
    return {"type": "error", "error": error, "request_id": request_id}
