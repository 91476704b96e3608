"""Gateway: takes HTTP requests from Ray Serve's proxy, and sees each to its end on one replica or another.

A request whose replica is lost, or cannot take it, before the answer has begun goes to another replica, and its
client does not notice. Later the replica's end is the answer's: a stream ends with an error event of its dialect.
The first part of a body is held back until it is there, so an answer has begun when its client reads of it.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from faser.api.bodies.errors import (
    CLIENT_CLOSED_REQUEST,
    ErrorResponse,
    HttpError,
    error_body,
    internal_error,
    messages_error_body,
)
from faser.api.bodies.openapi import speaks_messages
from faser.api.dialects.conversion import typed_event
from faser.api.http.paths import route_of
from faser.ray.calls import AnswerStart, Call, prompt_digests

_LOST = (RayActorError, ObjectLostError)
_MOST_LOST = 3  # replicas that one request may see lost: it may be what ends them
_PAUSE_S = 0.2  # after a loss, in which the router learns of it
_GONE = "the replica that was answering has ended"
_RETRY_AFTER = {"Retry-After": "1"}

_log = logging.getLogger("faser.ray")


class Gateway:
    """replicas: the handle of their deployment. max_request_bytes: a longer body is not read to its end."""

    def __init__(self, replicas: Any, max_request_bytes: int) -> None:
        self._replicas = replicas
        self._answers = replicas.options(method_name="answer", stream=True)
        self._max_request_bytes = max_request_bytes

    async def __call__(self, request: Request) -> Response:
        try:
            call = await self._read(request)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        try:
            return await (self._metrics(call) if call.path == "/metrics" else self._answer(call))
        except HttpError as error:
            return ErrorResponse(error)

    async def _read(self, request: Request) -> Call:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._max_request_bytes:
                break  # the replica refuses it
        scope = request.scope
        headers = tuple(scope["headers"])
        return Call(
            method=request.method,
            path=route_of(scope["path"], scope.get("root_path", "")),
            query=scope["query_string"],
            headers=headers,
            body=bytes(body),
            client=request.client,
            digests=prompt_digests(headers, bytes(body)) if body else (),
        )

    async def _answer(self, call: Call) -> Response:
        """Raises HttpError for an answer that no replica gives."""
        num_lost = 0
        while True:
            parts = self._answers.remote(call)
            try:
                start: AnswerStart = await anext(parts)
                first: bytes = await anext(parts, b"")
            except _LOST:
                num_lost += 1
                if num_lost == _MOST_LOST:
                    raise HttpError(500, f"{num_lost} replicas have ended while they had this request") from None
                _log.info("a request moves to another replica: its replica has ended")
                await asyncio.sleep(_PAUSE_S)
                continue
            except (BackPressureError, DeploymentUnavailableError) as error:
                raise HttpError(503, str(error), headers=_RETRY_AFTER) from None
            except RayTaskError as error:
                request_id = _request_id(call)
                _log.error("request %s failed", request_id, exc_info=error)
                raise internal_error(request_id) from None
            except BaseException:  # the client has gone
                parts.cancel()
                raise
            if start.elsewhere and start.replica not in call.avoid:
                call = replace(call, avoid=call.avoid | {start.replica})
                continue
            answer = StreamingResponse(_body(call, start, first, parts), start.status)
            answer.raw_headers = list(start.headers)
            return answer

    async def _metrics(self, call: Call) -> Response:
        """The series of all replicas, which the label `engine` tells apart."""
        try:
            answers = await self._replicas.broadcast("whole_answer", call).results_async()
        except _LOST:
            raise HttpError(503, "a replica has ended meanwhile", headers=_RETRY_AFTER) from None
        refused = next((each for each in answers if each[0] != 200), None)
        if refused is not None:
            return Response(refused[1], refused[0], media_type="application/json")
        registry = CollectorRegistry()
        registry.register(_Joined([body.decode() for _, body in answers]))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


async def _body(call: Call, start: AnswerStart, first: bytes, parts: Any) -> AsyncGenerator[bytes, None]:
    """parts: a DeploymentResponseGenerator, cancelled on exit."""
    streams = any(
        name == b"content-type" and value.startswith(b"text/event-stream") for name, value in start.headers
    )
    num_events = 0
    try:
        yield first
        num_events += first.count(b"\n\n")
        async for part in parts:
            yield part
            num_events += part.count(b"\n\n")
    except _LOST:
        if not streams:
            raise
        yield failure_events(call.path, _request_id(call), num_events)
    finally:
        parts.cancel()


def failure_events(path: str, request_id: str, num_events: int) -> bytes:
    """Return the bytes that end a stream whose replica is gone. num_events: already sent."""
    if speaks_messages(path):
        return typed_event(messages_error_body(500, _GONE, request_id))
    if path == "/v1/responses":
        error = {"type": "error", "code": "server_error", "message": _GONE, "param": None}
        return typed_event({**error, "sequence_number": num_events})
    return b"data: " + msgspec.json.encode(error_body(500, _GONE)) + b"\n\ndata: [DONE]\n\n"


def _request_id(call: Call) -> str:
    found = next((value.decode("latin-1") for name, value in call.headers if name == b"x-request-id"), None)
    return found or uuid.uuid4().hex


class _Joined(Collector):
    """pages: of /metrics, with the same families."""

    def __init__(self, pages: Sequence[str]) -> None:
        self._pages = pages

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for page in self._pages:
            for family in text_string_to_metric_families(page):
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        yield from families.values()
