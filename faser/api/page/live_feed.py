"""GET /live: what the live view shows, a sample a second, made once for all viewers.

    {"server": {…}, "history": [sample, …]}    first, to each viewer: the last two minutes
    {"sample": {…}}                            each second
    {"server": {…}}                            when the engine is loaded, or loaded again
    {"end": reason}                            last: slow (the viewer did not keep up), key (its API key was
                                               removed), closing (the server ends) or failed

One task makes the samples, from the first viewer until two minutes after the last one, so that a page that is
loaded again has its past. It ends with the drain: when the last request is done, no viewer holds the server up.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from faser.api.answers.handler import EventStream
from faser.api.bodies.errors import HttpError
from faser.api.bodies.openapi import PLAIN_ERRORS, answers
from faser.api.middleware.keys import ApiKeys, get_key_index
from faser.api.requests.service import Service
from faser.errors import NotReadyError, OverloadError
from faser.metrics.live import (
    HISTORY_S,
    INTERVAL_S,
    LATENCY_WINDOW_S,
    PERCENTILES,
    RESOLUTION,
    LiveRecorder,
    LiveSample,
    Snapshot,
    make_sample,
)
from faser.types.engine import EngineState, ModelInfo

MOST_VIEWERS_OF_A_KEY = 8
_MOST_WAITING = 8  # messages that a viewer has not taken; with one more it does not keep up
_LINGER_S = HISTORY_S
_DRAIN_POLL_S = 0.1
_RETRY_AFTER_S = 10
_log = logging.getLogger("faser.api")
LIVE_ROUTE = "/live"
LIVE_EVENTS = {
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
        lambda: service.num_in_progress,
        keys.accepts,
        most_viewers=settings.most_viewers,
    )

    @router.get(
        LIVE_ROUTE, responses={**answers(*PLAIN_ERRORS, 503), 200: LIVE_EVENTS}, response_class=StreamingResponse
    )
    async def get_live(request: Request) -> Response:
        events = feed.messages(get_key_index(request.scope))
        return EventStream(await anext(events), events)

    return router


class Viewed(Protocol):
    """An engine whose model is shown. See EngineClient."""

    @property
    def state(self) -> EngineState: ...

    @property
    def info(self) -> ModelInfo: ...


class Viewer:
    """One reader of the feed. key_index: of the API key that it presented; None: the server requires none."""

    def __init__(self, key_index: int | None) -> None:
        self.key_index = key_index
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._ended = False

    def send(self, message: bytes) -> None:
        """Queue a message; a viewer that does not keep up gets the end instead."""
        if self._messages.qsize() >= _MOST_WAITING:
            while not self._messages.empty():
                self._messages.get_nowait()
            self.end("slow")
        elif not self._ended:
            self._messages.put_nowait(message)

    def end(self, reason: str) -> None:
        if not self._ended:
            self._ended = True
            self._messages.put_nowait(_event({"end": reason}))
            self._messages.put_nowait(None)

    async def take(self) -> bytes | None:
        """The next message; None: there is none any more."""
        return await self._messages.get()


class LiveFeed:
    """Live view of one server. facts: what the server says of itself before its model is loaded.

    num_requests: how many HTTP requests generate now. accepts_key: whether the API key with this index is one of
    the server's still. most_viewers: at once. interval_s: of samples.
    """

    def __init__(
        self,
        engine: Viewed,
        recorder: LiveRecorder,
        facts: dict[str, Any],
        num_requests: Callable[[], int],
        accepts_key: Callable[[int], bool],
        *,
        most_viewers: int,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._engine = engine
        self._recorder = recorder
        self._facts = facts
        self._num_requests = num_requests
        self._accepts_key = accepts_key
        self._most_viewers = most_viewers
        self._interval_s = interval_s
        self._viewers: list[Viewer] = []
        self._unwatched_s = math.inf  # since when, by time.monotonic()
        self._sampler: asyncio.Task[None] | None = None
        self._wakened = asyncio.Event()
        recorder.on_change = self._wakened.set

        self._history: deque[msgspec.Raw] = deque(maxlen=HISTORY_S)  # without their timelines
        self._last: Snapshot  # of what viewers have, once there is one
        self._known_facts: dict[str, Any] | None = None  # the engine's part of the facts, as viewers have it

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    @property
    def is_sampling(self) -> bool:
        return self._sampler is not None

    async def messages(self, key_index: int | None) -> AsyncGenerator[bytes, None]:
        """The events of one viewer; closing the generator frees its place, once the first event was taken.

        Raises OverloadError (too many viewers), HttpError (429: too many of this key), or NotReadyError (the
        server ends).
        """
        self._check_room(key_index)
        viewer = Viewer(key_index)
        self._viewers.append(viewer)
        self._unwatched_s = math.inf
        try:
            if self._sampler is None:
                self._begin()
            yield _event({"server": self._server(), "history": list(self._history)})
            while (message := await viewer.take()) is not None:
                yield message
        finally:
            self._viewers.remove(viewer)
            if not self._viewers:
                self._unwatched_s = time.monotonic()

    def _check_room(self, key_index: int | None) -> None:
        if self._is_closing():
            raise NotReadyError(f"the engine is {self._engine.state}: there is nothing more to view")
        if len(self._viewers) >= self._most_viewers:
            raise OverloadError(
                f"the live view has {len(self._viewers)} viewers; at most {self._most_viewers} may watch at once",
                retry_after_s=_RETRY_AFTER_S,
            )
        of_key = Counter(each.key_index for each in self._viewers)[key_index]
        if key_index is not None and of_key >= MOST_VIEWERS_OF_A_KEY:
            raise HttpError(
                429,
                f"this API key has {of_key} live views; at most {MOST_VIEWERS_OF_A_KEY} are allowed at once",
                headers={"Retry-After": str(_RETRY_AFTER_S)},
            )

    def _is_closing(self) -> bool:
        """Return whether the server ends as soon as its connections are closed."""
        state = self._engine.state
        drained = state is EngineState.DRAINING and not self._num_requests()
        return drained or state is EngineState.DEAD

    def _server(self) -> dict[str, Any]:
        self._known_facts = self._engine_facts()
        return {**self._facts, "engine": self._known_facts}

    def _engine_facts(self) -> dict[str, Any] | None:
        """None before the model is loaded."""
        try:
            info = self._engine.info
        except NotReadyError:
            return None
        return {
            "device": info.device,
            "backend": info.backend,
            "dtype": info.dtype,
            "parameters": info.num_parameters,
            "context": info.max_model_len,
            "kv_tokens": info.num_blocks * info.block_size,
        }

    def _begin(self) -> None:
        """Make the history from what was recorded without viewers, and start to sample."""
        past = [*self._recorder.past, self._recorder.snapshot()]
        self._history.clear()
        for before, after in itertools.pairwise(past):
            self._keep(self._sample(before, after))
        self._last = past[-1]
        self._recorder.watch()
        self._sampler = asyncio.get_running_loop().create_task(self._run(), name="faser-live")

    async def _run(self) -> None:
        """Sample once a second until the server ends, or until there was no viewer for _LINGER_S."""
        reason = "failed"
        try:
            due_s = time.monotonic() + self._interval_s
            while not self._is_closing():
                await self._pause(due_s)
                if (now_s := time.monotonic()) >= due_s:
                    self._publish()
                    due_s = max(due_s, now_s - self._interval_s) + self._interval_s
                if now_s >= self._unwatched_s + _LINGER_S:
                    return
            self._publish()
            reason = "closing"
        except Exception:
            _log.exception("the live view ends")
        finally:
            self._sampler = None
            self._recorder.unwatch()
            for viewer in self._viewers:
                viewer.end(reason)

    async def _pause(self, due_s: float) -> None:
        """Until due_s, or until something must be looked at before."""
        left_s = max(0.0, due_s - time.monotonic())
        if self._engine.state is EngineState.DRAINING:
            left_s = min(left_s, _DRAIN_POLL_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wakened.wait(), left_s)
        self._wakened.clear()

    def _publish(self) -> None:
        """Encode what happened since the last time, once, and send it to every viewer."""
        before, self._last = self._last, self._recorder.snapshot()
        sample = self._sample(before, self._last)
        message = _event({"sample": sample})
        self._keep(sample)
        is_news = self._engine_facts() != self._known_facts
        server = _event({"server": self._server()}) if is_news else b""
        for viewer in self._viewers:
            if viewer.key_index is None or self._accepts_key(viewer.key_index):
                viewer.send(message + server)
            else:
                viewer.end("key")

    def _sample(self, before: Snapshot, after: Snapshot) -> LiveSample:
        return make_sample(
            before,
            after,
            uptime_s=self._recorder.uptime_s(after.at_s),
            latencies=self._recorder.latencies,
            steps=self._recorder.take_steps(),
        )

    def _keep(self, sample: LiveSample) -> None:
        without = msgspec.structs.replace(sample, timeline=[])
        self._history.append(msgspec.Raw(msgspec.json.encode(without)))


def server_facts(model: str, version: str) -> dict[str, Any]:
    """Return the constants that viewers need to read samples."""
    return {
        "model": model,
        "version": version,
        "interval_s": INTERVAL_S,
        "history_s": HISTORY_S,
        "latency_window_s": LATENCY_WINDOW_S,
        "latency_error": round(RESOLUTION, 4),
        "percentiles": list(PERCENTILES),
    }


def _event(message: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(message) + b"\n\n"
