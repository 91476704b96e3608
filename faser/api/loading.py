"""LoadingApp: what answers HTTP before there is an application, while the model is fetched."""

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from faser.api.bodies.errors import ErrorResponse, as_http_error
from faser.api.http.paths import route_of
from faser.api.page.files import PageFiles
from faser.errors import NotReadyError
from faser.metrics.replicas import ServerMetrics
from faser.metrics.server import CONTENT_TYPE
from faser.types.engine import EngineState

_PROBES = ("/health", "/ping")


class LoadingApp:
    """ASGI: 503 for every request until `application` is set; from then on that application answers.

    reason: what the server waits for, in words. metrics: those of the application to come; they count the requests
    refused meanwhile. shows_metrics: GET /metrics answers, without a key. page: is shown meanwhile, too; None:
    there is none. The application's lifespan is not run: it has none.
    """

    def __init__(
        self, reason: str, metrics: ServerMetrics, *, shows_metrics: bool = False, page: PageFiles | None = None
    ) -> None:
        self.application: ASGIApp | None = None
        self.reason = reason
        self._metrics = metrics
        self._shows_metrics = shows_metrics
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif self.application is not None:
            await self.application(scope, receive, send)
        else:
            await self._answer(scope)(scope, receive, send)

    def _answer(self, scope: Scope) -> Response:
        path = route_of(scope["path"], scope.get("root_path", ""))
        if self._page is not None and path in self._page.routes and scope["method"] in ("GET", "HEAD"):
            shown = self._page.answer(scope)
            if shown is not None:
                return shown
        state = EngineState.LOADING.value
        if path == "/metrics" and self._shows_metrics:
            return Response(self._metrics.render(), media_type=CONTENT_TYPE)
        if path in _PROBES:
            return JSONResponse({"state": state, "message": self.reason}, 503)
        if path == "/ready":
            return JSONResponse({"ready": False, "reason": state, "message": self.reason}, 503)
        if scope.get("method") == "POST":
            self._metrics.rejected(state)
        return ErrorResponse(as_http_error(NotReadyError(f"the engine is {state}: {self.reason}")))


async def _live(receive: Receive, send: Send) -> None:
    """The lifespan of a server: it starts and ends without work."""
    for event in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{event}.complete"})
