"""The path of a request as routes know it: without the proxy's path in front and without a slash at the end.

A proxy that serves FASER under a path (`--root-path`) may leave that path in front of the request's own or take it
away. Both are understood, as in vLLM.
"""


def route_of(path: str, root_path: str) -> str:
    """The route that a request asks for.

    path: of the ASGI scope: uvicorn puts root_path in front of what the client or its proxy sent.
    """
    route = path.removeprefix(root_path)
    if root_path and (route == root_path or route.startswith(f"{root_path}/")):
        route = route.removeprefix(root_path)
    return route.rstrip("/") or "/"
