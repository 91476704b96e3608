"""One server with several models: each request goes to the application of the model that it names.

A model has an application of its own, with all routes that answer requests; keys, limits, hosts and ids are
checked once, around all of them. The server's own routes list models, load and unload them. What is loaded, and
when, is the pool's part. With a single model none of this exists.
"""

import asyncio
import time
from contextlib import AsyncExitStack, suppress
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from faser.api.answers.handler import EventStream, while_connected
from faser.api.app import add_middleware, bare_app, include_dialects
from faser.api.bodies.body import parse_body, read_body, read_bytes
from faser.api.bodies.errors import as_http_error
from faser.api.bodies.fields import OPEN
from faser.api.bodies.openapi import BODY_ERRORS, PLAIN_ERRORS, answers, document, documented, include, json_body
from faser.api.dialects.late_start import LateStart
from faser.api.dialects.responses_routes import stored_responses_router
from faser.api.dialects.responses_store import ResponseStore
from faser.api.http.paths import route_of
from faser.api.middleware.keys import ApiKeys, get_key_index
from faser.api.page.files import PageFiles, page_router
from faser.api.page.live_feed import LIVE_EVENTS, LIVE_ROUTE, LiveFeed, server_facts
from faser.api.requests.adapters import Adapters
from faser.api.requests.service import ApiSettings, EngineClient, Service
from faser.api.routes import health_router, metrics_router, version_router
from faser.engine.client.model_pool import ModelPool, ModelState, PooledModel
from faser.errors import FaserError, NotReadyError, RequestError, UnknownModelError
from faser.memo import Memo
from faser.metrics.models import ModelsMetrics
from faser.metrics.server import Metrics
from faser.tracing import Tracer
from faser.types.engine import EngineState, ModelInfo

# A client that sends this header gets loads as events, in the form of llama.cpp's /models/sse, beside comments.
EVENTS_HEADER = "X-Model-Events"

_STREAMS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/invocations"})
_TELL_S = 1.0  # between two reports on a load
_REPEAT_S = 10.0  # of the same report, for proxies that close silent connections

Model = PooledModel[FastAPI]
Pool = ModelPool[FastAPI]


def model_app(
    engine: EngineClient,
    settings: ApiSettings,
    metrics: Metrics,
    store: ResponseStore,
    adapters: Adapters,
) -> FastAPI:
    """The application of one of several models. Raises ModelError for a broken chat template."""
    app = bare_app(settings)
    include_dialects(app, Service(engine, settings, metrics, adapters), store)
    return app


def create_models_app(
    pool: Pool,
    *,
    settings: ApiSettings,
    metrics: ModelsMetrics,
    store: ResponseStore,
    keys: ApiKeys,
    tracer: Tracer | None = None,
) -> FastAPI:
    """The application of the server. settings: what all models have in common. store: of all models' responses."""
    app = bare_app(settings)
    for router in (
        listed_models_router(pool),
        stored_responses_router(store),
        version_router(settings.version, lambda: sum(each.num_users for each in pool.models)),
        health_router(pool),
        metrics_router(metrics),
    ):
        include(app, router)
    page = PageFiles() if settings.page else None
    if page is not None:
        include(app, page_router(page))
        include(app, live_models_router(pool, metrics, settings, keys))
    routing = ModelRouting(pool, app, metrics, settings)
    app.router.default = routing
    app.openapi = routing.document  # type: ignore[method-assign]
    add_middleware(app, settings, metrics, keys, tracer, page)
    return app


def live_models_router(pool: Pool, metrics: ModelsMetrics, settings: ApiSettings, keys: ApiKeys) -> APIRouter:
    """The live view of each model: GET /live?model=NAME; without a name, of the one that was used last."""
    router = APIRouter()

    def feed_of(name: str) -> LiveFeed:
        model = find(pool, name)
        return LiveFeed(
            _Viewed(pool, model),
            metrics.of[name].live,
            server_facts(name, settings.version),
            lambda: model.num_users,
            keys.accepts,
            most_viewers=max(1, settings.most_viewers // len(pool.models)),
        )

    feeds = Memo[str, LiveFeed](feed_of)

    @router.get(
        LIVE_ROUTE,
        responses={**answers(*PLAIN_ERRORS, 404, 503), 200: LIVE_EVENTS},
        response_class=StreamingResponse,
    )
    async def get_live(http: Request, model: str | None = None) -> Response:
        shown = max(pool.models, key=lambda each: each.used_s) if model is None else find(pool, model)
        events = feeds[shown.name].messages(get_key_index(http.scope))
        return EventStream(await anext(events), events)

    return router


class _Viewed:
    """One of several models, as its live view needs it: the view ends with the server, not with the model."""

    def __init__(self, pool: Pool, model: Model) -> None:
        self._pool = pool
        self._model = model

    @property
    def state(self) -> EngineState:
        return self._pool.state

    @property
    def info(self) -> ModelInfo:
        """Raises NotReadyError while the model is not loaded."""
        if self._model.engine is None:
            raise NotReadyError(f"model {self._model.name!r} is not loaded")
        return self._model.engine.info


class ModelBody(BaseModel):
    """The name of a model."""

    model_config = OPEN

    model: str


def listed_models_router(pool: Pool) -> APIRouter:
    router = APIRouter()
    created_s = int(time.time())
    loads: set[asyncio.Task[None]] = set()

    @router.get("/v1/models", responses=answers(*PLAIN_ERRORS, 503))
    async def list_models() -> dict[str, Any]:
        cards = [_card(model, name, created_s) for model in pool.models for name in model.all_names]
        return {"object": "list", "data": cards}

    @router.get("/v1/models/{model:path}", responses=answers(*PLAIN_ERRORS, 404, 503))
    async def get_model(model: str) -> dict[str, Any]:
        return _card(find(pool, model), model, created_s)

    @router.post("/v1/models/load", openapi_extra=json_body(ModelBody), responses=answers(*BODY_ERRORS))
    async def load_model(http: Request) -> dict[str, bool]:
        """Begin to load a model; GET /v1/models tells how far that is, and why it failed."""
        body = await read_body(http, ModelBody, max_bytes=_MAX_NAME_BYTES)
        loading = asyncio.create_task(_load(pool, find(pool, body.model)))
        loads.add(loading)
        loading.add_done_callback(loads.discard)
        return {"success": True}

    @router.post("/v1/models/unload", openapi_extra=json_body(ModelBody), responses=answers(*BODY_ERRORS))
    async def unload_model(http: Request) -> dict[str, bool]:
        """Unload a model, when its running requests have ended; the answer comes when its memory is free."""
        body = await read_body(http, ModelBody, max_bytes=_MAX_NAME_BYTES)
        await pool.unload(find(pool, body.model))
        return {"success": True}

    return router


_MAX_NAME_BYTES = 64 << 10


async def _load(pool: Pool, model: Model) -> None:
    with suppress(FaserError):  # the model's state has it
        await pool.load(model)


def find(pool: Pool, name: str | None) -> Model:
    """The model with this name; None: the first one. Raises UnknownModelError."""
    model = pool.find(name)
    if model is None:
        assert name is not None
        known = ", ".join(each for model in pool.models for each in model.all_names)
        raise UnknownModelError(f"model {name[:200]!r} not found; available models: {known}", param="model")
    return model


def _card(model: Model, name: str, created_s: int) -> dict[str, Any]:
    """max_model_len: None before the model is loaded for the first time. An adapter's parent is its model."""
    adapters = model.source.adapters
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "faser",
        "root": adapters.get(name, model.source.root),
        "parent": model.name if name in adapters else None,
        "max_model_len": model.max_model_len,
        "status": status_of(model),
    }


def status_of(model: Model) -> dict[str, Any]:
    """The state of a model, in the form of llama.cpp's router."""
    status: dict[str, Any] = {"value": model.state.value}
    if model.state is ModelState.LOADING:
        stage, _, _ = model.progress
        status["progress"] = {"current": stage, "value": model.share_loaded}
    elif model.state is ModelState.UNLOADED and model.failure is not None:
        status |= {"failed": True, "message": str(model.failure)}
    return status


class _Asked(msgspec.Struct):
    """The fields of a body that say where it goes. Others are skipped, and no object is made of them."""

    model: Any = None
    stream: Any = None


class _AskedBody(BaseModel):
    """The same, for a body that the quick parser does not take: an error has the words that all bodies' have."""

    model: Any = None
    stream: Any = None


_decode = msgspec.json.Decoder(_Asked).decode


class ModelRouting:
    """ASGI: requests for which the server has no route of its own. app: the server's own routes."""

    def __init__(self, pool: Pool, app: FastAPI, metrics: ModelsMetrics, settings: ApiSettings) -> None:
        self._pool = pool
        self._own = app
        self._own_routes = documented(app)
        self._metrics = metrics
        self._max_request_bytes = settings.max_request_bytes
        self._max_logprobs = settings.max_logprobs
        self._knows_routes = False  # those of models; errors list them
        self._paths: dict[str, Any] = {}  # the same, as the document has them

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            await self._post(scope, receive, send)
            return
        app = self._any_app()
        if app is None:
            await self._own.router.not_found(scope, receive, send)
        else:
            app.state.routes = self._own.state.routes
            await app(scope, receive, send)  # which has no such route, and says which there are

    def document(self) -> dict[str, Any]:
        """The document of all routes; those of models are in it as soon as one has been loaded."""
        own = document(self._own, max_logprobs=self._max_logprobs)
        if not self._paths and (app := self._any_app()) is not None:
            self._paths = document(app, max_logprobs=self._max_logprobs)["paths"]
        return {**own, "paths": {**self._paths, **own["paths"]}}

    def _any_app(self) -> FastAPI | None:
        """An application of a model, whose routes are those of all of them; None: none is loaded."""
        app = next((each.app for each in self._pool.models if each.app is not None), None)
        if app is not None and not self._knows_routes:
            self._knows_routes = True
            self._own.state.routes = (*documented(app), *self._own_routes)
        return app

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await read_bytes(Request(scope, receive), max_bytes=self._max_request_bytes)
        asked = await _asked(raw)
        model, body = find(self._pool, asked.model), _Replayed(raw, receive)
        route = route_of(scope["path"], scope.get("root_path", ""))
        sent = LateStart(scope, route, send)
        tells = asked.stream is True and route in _STREAMS
        try:
            async with AsyncExitStack() as stack:
                if model.is_ready:
                    app = await stack.enter_async_context(self._pool.use(model))
                else:
                    wants_events = EVENTS_HEADER in Headers(scope=scope)
                    loading = self._loaded(stack, model, sent if tells else None, wants_events=wants_events)
                    app = await while_connected(loading, receive)
                await app(scope, body, sent if sent.begun else send)
        except FaserError as error:
            if isinstance(error, NotReadyError):
                self._metrics.of[model.name].rejected(EngineState.LOADING.value)
            if not sent.begun:
                raise
            await sent.fail(as_http_error(error))

    async def _loaded(
        self, stack: AsyncExitStack, model: Model, sent: LateStart | None, *, wants_events: bool
    ) -> FastAPI:
        """Wait for a model, and tell the client meanwhile. sent: None: its answer is no stream."""
        entering = asyncio.ensure_future(stack.enter_async_context(self._pool.use(model)))
        told, told_s = b"", time.monotonic()
        try:
            while not entering.done():
                await asyncio.wait({entering}, timeout=_TELL_S)
                if sent is None or entering.done():
                    continue
                report = _report(model, wants_events=wants_events)
                if report != told or time.monotonic() - told_s >= _REPEAT_S:
                    told, told_s = report, time.monotonic()
                    await sent.begin(report)
            return entering.result()
        finally:
            if not entering.done():
                entering.cancel()
                await asyncio.gather(entering, return_exceptions=True)


def _report(model: Model, *, wants_events: bool) -> bytes:
    """A comment of a stream on how far a load is, and an event for a client that asks for it."""
    stage, _, _ = model.progress
    share = "" if model.share_loaded is None else f" {100 * model.share_loaded:.0f} %"
    comment = " ".join(f": loading {model.name}{share} ({stage})".split()).encode() + b"\n\n"
    if not wants_events:
        return comment
    status = status_of(model)
    data = {"status": status.pop("value"), **status}
    told = {"model": model.name, "event": "model_status", "data": data}
    return comment + b"event: model_status\ndata: " + msgspec.json.encode(told) + b"\n\n"


async def _asked(raw: bytes) -> _Asked | _AskedBody:
    """Raises RequestError, and HttpError (413) as parse_body does."""
    asked: _Asked | _AskedBody
    try:
        asked = _decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        asked = await parse_body(raw, _AskedBody)
    if asked.model is not None and not isinstance(asked.model, str):
        raise RequestError("model is not a string; it must be the name of a model", param="model")
    return asked


class _Replayed:
    """The `receive` of a request whose body has been read."""

    def __init__(self, raw: bytes, receive: Receive) -> None:
        self._raw: bytes | None = raw
        self._receive = receive

    async def __call__(self) -> Message:
        if self._raw is None:
            return await self._receive()
        raw, self._raw = self._raw, None
        return {"type": "http.request", "body": raw, "more_body": False}
