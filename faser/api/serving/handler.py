"""An accepted body to an answer: submit, gather or stream, count, and give up when the client leaves."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import Request as HttpRequest
from starlette.responses import Response

from faser.api.middleware.disconnect import while_connected
from faser.api.protocol.errors import HttpError, as_http_error, error_body, internal_error
from faser.api.serving.engine_client import OutputStream
from faser.api.serving.formatter import AnswerFormatter, ChoiceState
from faser.api.serving.prompts import Prompt
from faser.api.serving.service import Service
from faser.api.serving.settings import ApiSettings
from faser.api.serving.speculation_report import SpeculationReport
from faser.api.serving.stream import DONE, ChunkWriter, EventStream, event
from faser.api.serving.usage import Usage
from faser.errors import FaserError
from faser.types import OutputDelta, Request, RequestOutput

_log = logging.getLogger("faser.api")


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """How a request wants its stream. ends_with_usage: a last chunk without choices has it."""

    ends_with_usage: bool = False
    continuous_usage: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationHandler:
    """One body, ready to run. requests: one a prompt, each for n samples; choices are prompt-major.

    envelope: id, created, model and system_fingerprint of the answer. streaming: None for one JSON answer.
    predicted: the prediction in the body; None: it has none.
    """

    request_id: str
    requests: tuple[Request, ...]
    prompts: tuple[Prompt, ...]
    shape: AnswerFormatter
    envelope: dict[str, Any]
    streaming: Streaming | None = None
    predicted: tuple[int, ...] | None = None

    def states(self) -> list[ChoiceState]:
        n = self.requests[0].sampling.n
        return [
            ChoiceState(index=at * n + sample, prompt=prompt)
            for at, prompt in enumerate(self.prompts)
            for sample in range(n)
        ]

    def usage(self) -> Usage:
        return Usage([len(prompt.token_ids) for prompt in self.prompts], predicted=self.predicted)

    def report(self, settings: ApiSettings) -> SpeculationReport:
        first = self.requests[0]
        return SpeculationReport(
            first.speculation,
            num_choices=len(self.requests) * first.sampling.n,
            level=settings.spec_decode_metrics,
            cap=settings.speculation.cap,
        )


async def respond(service: Service, job: GenerationHandler, http: HttpRequest) -> Response:
    """The HTTP answer. A failure before the first token is raised, so that it has a status of its own.

    Raises FaserError, or ClientDisconnect; either way nothing of the job runs on.
    """
    if job.streaming is None:
        body = await while_connected(_gathered(service, job), http.receive)
        return Response(body, media_type="application/json")
    events = _events(service, job, job.streaming)
    first = await while_connected(_next(events), http.receive)
    return EventStream(first, events)


async def _gathered(service: Service, job: GenerationHandler) -> bytes:
    """The whole answer as JSON."""
    states, usage, report = job.states(), job.usage(), job.report(service.settings)
    deltas: list[list[OutputDelta]] = [[] for _ in states]
    async with (
        service.submitted(job.requests, field=job.shape.prompt_field) as streams,
        aclosing(_merged(streams)) as outputs,
    ):
        async for at, output in outputs:
            usage.count(at, output)
            for state, delta in _placed(job, states, at, output):
                deltas[state.index].append(delta)
                report.take(state.index, delta)
    choices = [job.shape.whole(state, _joined(own)) for state, own in zip(states, deltas, strict=True)]
    return msgspec.json.encode(
        {
            **job.envelope,
            "object": job.shape.object_name,
            "choices": choices,
            "usage": usage.as_json(),
            **report.as_json(),
            **job.shape.beside_choices(states),
        }
    )


async def _events(service: Service, job: GenerationHandler, streaming: Streaming) -> AsyncGenerator[bytes, None]:
    """The events of a stream, those of one engine step together. Raises only before the first."""
    states, usage, report = job.states(), job.usage(), job.report(service.settings)
    writer = ChunkWriter(
        {**job.envelope, "object": job.shape.chunk_object_name},
        with_usage=streaming.ends_with_usage or streaming.continuous_usage,
    )
    started = False
    try:
        async with (
            service.submitted(job.requests, field=job.shape.prompt_field) as streams,
            aclosing(_merged(streams)) as outputs,
        ):
            async for at, output in outputs:
                usage.count(at, output)
                running = usage.as_json() if streaming.continuous_usage else None
                events = []
                for state, delta in _placed(job, states, at, output):
                    report.take(state.index, delta)
                    events += [writer.chunk([choice], running) for choice in job.shape.pieces(state, delta)]
                if events:
                    started = True
                    yield b"".join(events)
    except Exception as error:
        if not started:
            raise
        failure = _explained(job, error)
        yield event(error_body(failure.status, failure.message, failure.param)) + DONE
        return
    last = writer.last({"usage": usage.as_json(), **report.as_json()}) if streaming.ends_with_usage else b""
    yield last + DONE


async def _next(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


def _explained(job: GenerationHandler, error: Exception) -> HttpError:
    if isinstance(error, FaserError):
        return as_http_error(error)
    _log.error("request %s failed", job.request_id, exc_info=error)
    return internal_error(job.request_id)


def _placed(
    job: GenerationHandler, states: Sequence[ChoiceState], at: int, output: RequestOutput
) -> list[tuple[ChoiceState, OutputDelta]]:
    """The deltas of one prompt's output beside their choices."""
    n = job.requests[at].sampling.n
    if output.prompt_logprobs is not None:
        for state in states[at * n : (at + 1) * n]:
            state.prompt_logprobs = output.prompt_logprobs
    return [(states[at * n + delta.index], delta) for delta in output.deltas]


def _joined(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """All deltas of one choice as if they had come in one step."""
    last = deltas[-1]
    reports = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return OutputDelta(
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=tuple(position for report in reports for position in report) if reports else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )


async def _merged(streams: Sequence[OutputStream]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of all streams as they come, beside the index of their stream. Raises what a stream raises."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    arrived: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue()
    pumps = [asyncio.create_task(_pump(at, stream, arrived)) for at, stream in enumerate(streams)]
    try:
        num_open = len(streams)
        while num_open:
            match await arrived.get():
                case None:
                    num_open -= 1
                case Exception() as error:
                    raise error
                case placed:
                    yield placed
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    at: int, stream: OutputStream, arrived: asyncio.Queue[tuple[int, RequestOutput] | Exception | None]
) -> None:
    try:
        async for output in stream:
            arrived.put_nowait((at, output))
        arrived.put_nowait(None)
    except Exception as error:
        arrived.put_nowait(error)
