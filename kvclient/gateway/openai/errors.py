"""Errors in OpenAI's shape."""

from __future__ import annotations

from typing import Any, Final

from kvclient.errors import KvdError

TYPES: Final = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "invalid_request_error",
    405: "invalid_request_error", 413: "invalid_request_error", 429: "rate_limit_error", 499: "cancelled_error",
}
CODES: Final = {"unknown_model": "model_not_found", "bad_request": None}


def error_body(problem: KvdError, status: int) -> dict[str, Any]:
    """`{"error": {message, type, param, code, details}}`; `details` holds the numbers that tripped."""
    code = problem.details.get("code", CODES.get(problem.code, problem.code))
    details = {key: value for key, value in problem.details.items() if key not in ("field", "code", "status")}
    error: dict[str, Any] = {
        "message": problem.message,
        "type": TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error"),
        "param": problem.details.get("field", "model" if problem.code == "unknown_model" else None),
        "code": code,
    }
    if details:
        error["details"] = details
    return {"error": error}
