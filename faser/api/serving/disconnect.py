"""Cancels work whose client has disconnected."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

_T = TypeVar("_T")


async def while_connected(work: Coroutine[Any, Any, _T], receive: Receive) -> _T:
    """The result of work. receive: of a request whose body has been read.

    Raises ClientDisconnect if the client disconnects first, after work has been cancelled and has cleaned up.
    """
    working = asyncio.ensure_future(work)
    disconnecting = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, disconnecting}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        disconnecting.cancel()
        await asyncio.gather(working, disconnecting, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
