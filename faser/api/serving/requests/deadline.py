"""The deadline of a request: the shortest of the server's limit, the body's `timeout` and the header's."""

import math

from starlette.datastructures import Headers

from faser.errors import RequestError

TIMEOUT_HEADER = "X-Request-Timeout"


def deadline_of(
    body_timeout: float | None, headers: Headers, server_timeout_s: float | None, arrival_s: float
) -> float | None:
    """When the request must be finished, by the clock of arrival_s; None: it has no deadline.

    Raises RequestError for a timeout that is not a number of seconds above 0.
    """
    given = [
        each
        for each in (server_timeout_s, _checked("timeout", body_timeout), _header(headers))
        if each is not None
    ]
    return arrival_s + min(given) if given else None


def _header(headers: Headers) -> float | None:
    text = headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        return _checked(TIMEOUT_HEADER, float(text))
    except ValueError:
        raise _refusal(TIMEOUT_HEADER, text[:80]) from None


def _checked(name: str, timeout_s: float | None) -> float | None:
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise _refusal(name, timeout_s)
    return timeout_s


def _refusal(name: str, value: object) -> RequestError:
    return RequestError(f"{name} is {value}; it must be a number of seconds above 0", param=name)
