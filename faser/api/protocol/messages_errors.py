"""Errors as Anthropic's Messages word them, for the routes of that dialect."""

from http import HTTPStatus
from typing import Any

_PATH = "/v1/messages"

_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


def speaks_messages(path: str) -> bool:
    """Whether a route's errors have this shape."""
    return path == _PATH or path.startswith(_PATH + "/")


def messages_error_body(status: int, message: str, request_id: str | None) -> dict[str, Any]:
    kind = _TYPES.get(HTTPStatus(status), "api_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else None)
    return {
        "type": "error",
        "error": {"type": kind or "invalid_request_error", "message": message},
        "request_id": request_id,
    }
