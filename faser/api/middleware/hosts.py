"""The names that a server without keys answers to, and the web pages that may ask it.

Pages of any site can send requests to a server that their visitor's browser reaches. They cannot read answers from
another origin, but their requests would be served; and a page that gives the server's address to its own name (DNS
rebinding) is of the server's origin, and reads the answers. No page can choose the headers Host, Origin and
Sec-Fetch-Site, so these tell such requests apart. Where keys are required nothing is checked here: a page of
another site knows no key.
"""

import logging
import socket
from collections.abc import Iterable
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from faser.api.bodies.errors import ErrorResponse, HttpError
from faser.api.http.paths import route_of
from faser.api.middleware.keys import OPEN_PATHS

_log = logging.getLogger("faser.api")

# Domains that are not in the public DNS (RFC 6761, 6762, 8375, and ICANN's resolution of 2024).
_LOCAL_DOMAINS = (".localhost", ".local", ".internal", ".home.arpa")
_SAME_ORIGIN = ("same-origin", "none")  # what browsers say of a page's own server, and of what the user typed


class AllowedHosts:
    """The names in Host headers that are answered: this machine's, those that nobody can register, and the given.

    names: a name, *.domain for all names below a domain, or * for all. An address is no name: a page that has it
    as its origin came from there.
    """

    def __init__(self, names: Iterable[str]) -> None:
        given = {each.lower() for each in names}
        self.all = "*" in given
        self._exact = {socket.gethostname().lower(), *given}
        self._domains = (*_LOCAL_DOMAINS, *(each[1:] for each in given if each.startswith("*.")))

    def __contains__(self, name: str) -> bool:
        """name: as of name_of."""
        if self.all or "." not in name or name in self._exact or name.endswith(self._domains):
            return True  # names without a dot are of this machine's network: no public one is without
        return _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def name_of(authority: str) -> str:
    """The host of `host:port`, without brackets and port."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0].lower()
    return authority.partition(":")[0].rstrip(".").lower()


class HostMiddleware:
    """ASGI middleware of a server without keys: refuses foreign names and pages on every route but the probes.

    origins: of pages that may use the server (CORS).
    """

    def __init__(self, app: ASGIApp, *, hosts: AllowedHosts, origins: tuple[str, ...]) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = frozenset(origins)
        self._has_warned = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and route_of(scope["path"], scope.get("root_path", "")) not in OPEN_PATHS:
            refusal = self._refusal(Headers(scope=scope))
            if refusal is not None:
                await ErrorResponse(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> HttpError | None:
        """The error for a request that this server must not answer; None: it may."""
        name = name_of(headers.get("host", ""))
        if name not in self._hosts:
            message = (
                f"the Host is {name[:80]!r}, which is no name of this server, and a server without API keys "
                "answers to its own names only (web pages could use it by DNS rebinding); start it with "
                f"--allowed-hosts {name[:80]}, or with --api-key"
            )
            if not self._has_warned:  # whoever set a proxy up sees why, and nobody fills the log
                self._has_warned = True
                _log.warning("a request was refused with status 403; others are not logged here: %s", message)
            return HttpError(403, message)
        origin = headers.get("origin")
        if origin is None or origin in self._origins or headers.get("sec-fetch-site") in _SAME_ORIGIN:
            return None
        page = name_of(origin.partition("://")[2])
        if page and page == name:
            return None
        return HttpError(
            403,
            f"the Origin is {origin[:80]!r}, and a server without API keys answers no page of another site; start "
            f"it with --allowed-origins {origin[:80]} to let this one use it",
        )
