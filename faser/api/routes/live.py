"""GET /live: the numbers of the live view, as server-sent events."""

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from faser.api.middleware.api_keys import ApiKeys
from faser.api.middleware.auth import get_key_index
from faser.api.page.live_feed import LiveFeed, server_facts
from faser.api.routes.openapi import PLAIN_ERRORS, answers
from faser.api.serving.event_stream import EventStream
from faser.api.serving.service import Service

LIVE_ROUTE = "/live"

_EVENTS = {
    "description": "Events, one a second.",
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}


def live_router(service: Service, keys: ApiKeys) -> APIRouter:
    """keys: of the server, now and later."""
    router = APIRouter()
    settings = service.settings
    feed = LiveFeed(
        service.engine,
        service.metrics.live,
        server_facts(settings.served_model_names[0], settings.version),
        lambda: service.in_progress.count,
        keys.accepts,
        most_viewers=settings.most_viewers,
    )

    @router.get(
        LIVE_ROUTE, responses={**answers(*PLAIN_ERRORS, 503), 200: _EVENTS}, response_class=StreamingResponse
    )
    async def get_live(request: Request) -> Response:
        events = feed.messages(get_key_index(request.scope))
        return EventStream(await anext(events), events)

    return router
