"""Error answers: one JSON shape for every status; the routes of Anthropic's Messages have a shape of their own.

Owns the status, type and headers of every error. Only this module translates FaserErrors and the web framework's
exceptions.
"""

import logging
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ExceptionHandler, Receive, Scope, Send

from faser.api.bodies.openapi import documented, speaks_messages
from faser.errors import (
    DeadlineError,
    EngineDiedError,
    FaserError,
    NotReadyError,
    OverloadError,
    RequestError,
    TargetError,
    UnknownModelError,
)

_ANTHROPIC_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}

_log = logging.getLogger("faser.api")

# llm-d's, with which its router says why it has refused a request.
DROPPED_REASON_HEADER = "x-llm-d-request-dropped-reason"

# The status that proxies log for a client that disconnected; it is not received.
CLIENT_CLOSED_REQUEST = 499
_OPENAI_TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.UNAUTHORIZED: "AuthenticationError",
    HTTPStatus.FORBIDDEN: "PermissionDeniedError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.METHOD_NOT_ALLOWED: "MethodNotAllowedError",
    HTTPStatus.REQUEST_TIMEOUT: "RequestTimeoutError",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "RequestTooLargeError",
    HTTPStatus.REQUEST_URI_TOO_LONG: "RequestTooLargeError",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "UnsupportedMediaTypeError",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "RequestTooLargeError",
    HTTPStatus.TOO_MANY_REQUESTS: "RateLimitError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
    HTTPStatus.GATEWAY_TIMEOUT: "GatewayTimeoutError",
    HTTPStatus.INTERNAL_SERVER_ERROR: "InternalServerError",
}


class HttpError(Exception):
    """An answer other than 2xx."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = headers or {}


class ErrorResponse(Response):
    """An error in the shape of OpenAI, or of the dialect of the route that sends it."""

    def __init__(self, error: HttpError) -> None:
        body = msgspec.json.encode(error_body(error.status, error.message, error.param))
        super().__init__(body, error.status, error.headers, media_type="application/json")
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not speaks_messages(scope["path"].removeprefix(scope.get("root_path", ""))):
            await super().__call__(scope, receive, send)
            return
        error, request_id = self._error, scope.get("state", {}).get("request_id")
        body = msgspec.json.encode(messages_error_body(error.status, error.message, request_id))
        await Response(body, error.status, error.headers, media_type="application/json")(scope, receive, send)


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """{"error": {...}}, the shape of every error, also within a stream."""
    return {"error": {"message": message, "type": error_type(status), "param": param, "code": status}}


def error_type(status: int) -> str:
    """Return OpenAI's type name for errors with this status."""
    return _OPENAI_TYPES.get(HTTPStatus(status), "APIError")


def messages_error_body(status: int, message: str, request_id: str | None) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(
        HTTPStatus(status), "api_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else None
    )
    return {
        "type": "error",
        "error": {"type": kind or "invalid_request_error", "message": message},
        "request_id": request_id,
    }


def as_http_error(error: FaserError) -> HttpError:
    """The class of the error decides the status; see faser.errors."""
    match error:
        case UnknownModelError():
            return HttpError(404, str(error), param=error.param)
        case RequestError():
            return HttpError(400, str(error), param=error.param)
        case TargetError():
            headers = {"Retry-After": str(error.retry_after_s), DROPPED_REASON_HEADER: "rejected-saturated"}
            return HttpError(429, str(error), headers=headers)
        case OverloadError() | NotReadyError() | EngineDiedError():
            return HttpError(503, str(error), headers={"Retry-After": str(error.retry_after_s)})
        case DeadlineError():
            return HttpError(504, str(error))
        case _:
            return HttpError(500, str(error))


def internal_error(request_id: str) -> HttpError:
    """For a bug: the log has the traceback, the client gets the request id to find it by."""
    return HttpError(500, f"request {request_id} failed because of an internal error; see the server's log")


def add_error_handlers(app: FastAPI) -> None:
    handlers: dict[type[Exception], ExceptionHandler] = {
        HttpError: _on_http_error,
        FaserError: _on_faser_error,
        HTTPException: _on_framework_error,
        RequestValidationError: _on_validation_error,
        ClientDisconnect: _on_disconnect,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError)
    return ErrorResponse(error)


async def _on_faser_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, FaserError)
    answer = as_http_error(error)
    if answer.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        _log.error("%s", error)
    return ErrorResponse(answer)


async def _on_framework_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    match error.status_code:
        case 404:
            message = f"{request.method} {request.url.path} not found; available routes: {_offered(request.app)}"
        case 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            message = f"{request.url.path} does not take {request.method}; it takes {allowed}"
        case _:
            message = str(error.detail)
    return ErrorResponse(HttpError(error.status_code, message, headers=dict(error.headers or {})))


def _offered(app: FastAPI) -> str:
    """The routes that the app's document has."""
    return ", ".join(
        f"{method} {each.path_format}" for each in documented(app) for method in sorted(each.methods or ())
    )


async def _on_validation_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"][1:])
    return ErrorResponse(HttpError(400, f"{path}: {first['msg']}", param=path))


async def _on_disconnect(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
