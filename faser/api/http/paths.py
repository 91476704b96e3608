"""The path of a request as routes know it: without the proxy's path in front and without a slash at the end.

A proxy that serves FASER under a path (`--root-path`) may leave that path in front of the request's own or take it
away. Both are understood, as in vLLM. OpenAI's routes are also found without /v1, and /health with it, as in
llama.cpp's server.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

_V1 = "/v1"
_WITHOUT_V1 = frozenset({"chat", "completions", "models", "responses"})  # first parts of OpenAI's paths
_HEALTH = "/health"


def route_of(path: str, root_path: str) -> str:
    """The route that a request asks for.

    path: of the ASGI scope: uvicorn puts root_path in front of what the client or its proxy sent.
    """
    route = path.removeprefix(root_path)
    if root_path and (route == root_path or route.startswith(f"{root_path}/")):
        route = route.removeprefix(root_path)
    route = route.rstrip("/") or "/"
    if route.split("/", 2)[1] in _WITHOUT_V1:
        return _V1 + route
    return _HEALTH if route == _V1 + _HEALTH else route


class PathMiddleware:
    """ASGI middleware around every one that reads paths."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            root_path = scope.get("root_path", "")
            scope["path"] = root_path + route_of(scope["path"], root_path)
        await self._app(scope, receive, send)
