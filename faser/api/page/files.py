"""The page that browsers show at /, and the files below /page/: read once, and the answers that carry them.

The page is the same for every visitor and holds no secret, so it needs no key; what it asks of the server does. A
program that asks / for JSON learns the routes.
"""

from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response
from starlette.types import Scope

from faser.api.http.paths import route_of

_FOLDER = Path(__file__).parent / "static"
_INDEX = "index.html"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

# Scripts and styles come from this server's files only, never from within a document; no string becomes markup.
_CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Vary": "Accept",
    "Cache-Control": "no-cache",  # a browser asks each time, and learns by the ETag that nothing is new
}


class PageFiles:
    """Every file by its route: / is the document, the others lie below /page/."""

    def __init__(self, folder: Path = _FOLDER) -> None:
        self._files: dict[str, tuple[bytes, str, str]] = {}  # body, type and ETag
        for path in sorted(each for each in folder.rglob("*") if each.is_file()):
            body, name = path.read_bytes(), path.relative_to(folder).as_posix()
            route = "/" if name == _INDEX else f"/page/{name}"
            self._files[route] = (body, _TYPES[path.suffix], f'"{sha256(body).hexdigest()[:32]}"')

    @property
    def routes(self) -> frozenset[str]:
        return frozenset(self._files)

    def answer(self, scope: Scope) -> Response | None:
        """The answer to a GET or HEAD of one of the routes; None: the client is a program, not a browser.

        A 200 with the file, a 304 for a browser that has it, or a redirect to / where a proxy's path is asked for
        without the slash at its end: addresses in the document are relative to its folder.
        """
        route, headers = route_of(scope["path"], scope.get("root_path", "")), Headers(scope=scope)
        if route == "/":
            accepted = headers.get("accept", "")
            if "application/json" in accepted and "text/html" not in accepted:
                return None
            raw_path: bytes = scope.get("raw_path") or b"/"
            if not raw_path.endswith(b"/"):
                return RedirectResponse(raw_path.rpartition(b"/")[2].decode("latin-1") + "/", 308)
        body, media_type, tag = self._files[route]
        kept = {each.strip().removeprefix("W/") for each in headers.get("if-none-match", "").split(",")}
        if tag in kept or "*" in kept:
            return Response(status_code=304, headers={**_HEADERS, "ETag": tag})
        return Response(body, headers={**_HEADERS, "ETag": tag}, media_type=media_type)


def page_router(files: PageFiles) -> APIRouter:
    router = APIRouter()

    async def get_file(http: Request) -> Response:
        shown = files.answer(http.scope)
        if shown is None:
            raise HTTPException(404)  # its message lists the routes
        return shown

    for route in sorted(files.routes):
        router.add_api_route(route, get_file, methods=["GET", "HEAD"], include_in_schema=False)
    return router
