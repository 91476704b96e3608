"""The errors with which a connection refuses a client before the application sees the request, and their bytes."""

from http import HTTPStatus

from faser.api.protocol.errors import HttpError, error_response


def not_http(reason: str) -> HttpError:
    return HttpError(400, f"the request is not HTTP/1.1: {reason}")


def too_slow(part: str, timeout_s: float) -> HttpError:
    return HttpError(408, f"the {part} did not arrive within {timeout_s:g} s")


def url_too_long(limit: int) -> HttpError:
    return HttpError(414, f"the request line is too long; with the headers, at most {limit} bytes are allowed")


def head_too_large(limit: int) -> HttpError:
    return HttpError(
        431, f"the request line and headers have more than {limit} bytes; at most that many are allowed"
    )


def too_many_headers(limit: int) -> HttpError:
    return HttpError(431, f"the request has more than {limit} headers; at most that many are allowed")


def overloaded() -> HttpError:
    return HttpError(503, "all connections for requests are in use", headers={"Retry-After": "1"})


def answer(error: HttpError, default_headers: list[tuple[bytes, bytes]]) -> bytes:
    """The error as bytes for the socket. Says that the connection closes."""
    response = error_response(error)
    status = HTTPStatus(error.status)
    headers = [*default_headers, *response.raw_headers, (b"connection", b"close")]
    lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode(), *(b": ".join(header) for header in headers)]
    return b"\r\n".join([*lines, b"", bytes(response.body)])
