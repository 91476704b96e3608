"""EventStream: the HTTP answer that sends events as they are made. Knows nothing of what is in them."""

from collections.abc import AsyncGenerator
from contextlib import suppress

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from faser.api.serving.disconnect import while_connected

# Proxies must forward each event at once.
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream(StreamingResponse):
    """Sends events until they end or the client disconnects; either closes their generator at once."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        """first: the first events, already taken from the generator. rest: the generator."""
        super().__init__(_after(first, rest), media_type="text/event-stream", headers=_HEADERS)
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        try:
            with suppress(ClientDisconnect):
                await while_connected(self.stream_response(send), receive)
        finally:
            await self._rest.aclose()


async def _after(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    yield first
    async for events in rest:
        yield events
