"""PathMiddleware: gives every request the path that its route has, whatever a proxy put in front of it."""

from starlette.types import ASGIApp, Receive, Scope, Send

from faser.api.http.paths import route_of


class PathMiddleware:
    """ASGI middleware around every one that reads paths."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            root_path = scope.get("root_path", "")
            scope["path"] = root_path + route_of(scope["path"], root_path)
        await self._app(scope, receive, send)
