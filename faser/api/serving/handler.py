"""GenerationHandler: runs the engine requests of one HTTP request and writes the answer.

Submits the requests, gathers or streams their outputs, counts tokens, and aborts when the client disconnects.
How a choice looks is the formatter's part.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from fastapi import Request as HttpRequest
from starlette.responses import Response

from faser.api.protocol.errors import HttpError, as_http_error, internal_error
from faser.api.serving.answers.formatter import AnswerFormatter, ChoiceState
from faser.api.serving.answers.framing import AnswerFraming
from faser.api.serving.answers.speculation_report import SpeculationReport
from faser.api.serving.answers.usage import Usage
from faser.api.serving.disconnect import while_connected
from faser.api.serving.engine_client import OutputReader
from faser.api.serving.event_stream import EventStream
from faser.api.serving.generation_record import GenerationRecord
from faser.api.serving.requests.prompts import TokenizedPrompt
from faser.api.serving.service import Service
from faser.api.tracing.request_trace import RequestTrace
from faser.errors import FaserError
from faser.types import OutputDelta, Request, RequestOutput

_log = logging.getLogger("faser.api")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationHandler:
    """One HTTP request, checked and tokenised.

    requests: one per prompt, each for n samples. Choices are numbered by prompt, then by sample.
    streams: the answer is a stream; otherwise it is one JSON document.
    predicted: token ids of the body's prediction; None: the body has none.
    use_tokens: is told how many tokens, prompt and generated, the request uses.
    record: what the request's span says of it. trace: of the request; None: it has no span.
    """

    service: Service
    request_id: str
    requests: tuple[Request, ...]
    prompts: tuple[TokenizedPrompt, ...]
    formatter: AnswerFormatter
    framing: AnswerFraming
    use_tokens: Callable[[int], None]
    record: GenerationRecord
    trace: RequestTrace | None = None
    streams: bool = False
    predicted: tuple[int, ...] | None = None

    async def respond(self, http: HttpRequest) -> Response:
        """The HTTP answer. A failure before the first token is raised, so that it has its own HTTP status.

        Raises FaserError, or ClientDisconnect. In both cases all requests have been aborted.
        """
        if not self.streams:
            body = await while_connected(self._json_answer(), http.receive)
            return Response(body, media_type="application/json")
        events = self._events()
        first = await while_connected(_next(events), http.receive)
        return EventStream(first, events)

    async def _json_answer(self) -> bytes:
        """The whole answer as JSON."""
        states, usage, report = self._states(), self._usage(), self._speculation_report()
        deltas: list[list[OutputDelta]] = [[] for _ in states]
        async with (
            self.service.submitted(self.requests, field=self.formatter.prompt_field) as readers,
            aclosing(_merged(readers)) as outputs,
        ):
            usage.count_prompts()
            self.record.follow(readers, states, usage, report)
            async for prompt_index, output in outputs:
                usage.count_cached(prompt_index, output.num_cached_tokens)
                for state, delta in self._by_choice(states, prompt_index, output):
                    usage.count(state.index, delta)
                    deltas[state.index].append(delta)
                    report.take(state.index, delta)
        choices = [self.formatter.choice(state, _joined(own)) for state, own in zip(states, deltas, strict=True)]
        for state, choice in zip(states, choices, strict=True):
            usage.count_reasoning(state.index, state.num_reasoning_tokens)
            state.finish_reason = choice["finish_reason"]
        return msgspec.json.encode(self.framing.document(choices, states, usage, report))

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """The events of a stream; those of one engine step come joined. Raises only before the first event."""
        states, usage, report = self._states(), self._usage(), self._speculation_report()
        started = False
        try:
            async with (
                self.service.submitted(self.requests, field=self.formatter.prompt_field) as readers,
                aclosing(_merged(readers)) as outputs,
            ):
                usage.count_prompts()
                self.record.follow(readers, states, usage, report)
                async for prompt_index, output in outputs:
                    usage.count_cached(prompt_index, output.num_cached_tokens)
                    events = []
                    for state, delta in self._by_choice(states, prompt_index, output):
                        usage.count(state.index, delta)
                        report.take(state.index, delta)
                        chunks = self.formatter.chunks(state, delta)
                        if delta.finish_reason is not None:
                            state.finish_reason = chunks[-1]["finish_reason"]
                        usage.count_reasoning(state.index, state.num_reasoning_tokens)
                        events.append(self.framing.events(chunks, usage))
                    if any(events):
                        started = True
                        yield b"".join(events)
        except Exception as error:
            if not started:
                raise
            answer = self._as_http_error(error)
            if self.trace is not None:
                self.trace.late_status = answer.status
            yield self.framing.failure(answer)
            return
        yield self.framing.end(usage, report)

    def _states(self) -> list[ChoiceState]:
        n = self.requests[0].sampling.n
        return [
            ChoiceState(index=prompt_index * n + sample, prompt=prompt)
            for prompt_index, prompt in enumerate(self.prompts)
            for sample in range(n)
        ]

    def _usage(self) -> Usage:
        return Usage(
            [len(prompt.token_ids) for prompt in self.prompts],
            predicted=self.predicted,
            shares_cache=self.requests[0].shares_cache,
            on_tokens=self.use_tokens,
        )

    def _speculation_report(self) -> SpeculationReport:
        first, settings = self.requests[0], self.service.settings
        return SpeculationReport(
            first.speculation,
            num_choices=len(self.requests) * first.sampling.n,
            level=settings.spec_decode_metrics,
            cap=settings.speculation.cap,
            shares_cache=first.shares_cache,
        )

    def _by_choice(
        self, states: Sequence[ChoiceState], prompt_index: int, output: RequestOutput
    ) -> list[tuple[ChoiceState, OutputDelta]]:
        """Each delta of one prompt's output, paired with its choice."""
        n = self.requests[prompt_index].sampling.n
        first = prompt_index * n
        if output.prompt_logprobs is not None:
            for state in states[first : first + n]:
                state.prompt_logprobs = output.prompt_logprobs
        return [(states[first + delta.index], delta) for delta in output.deltas]

    def _as_http_error(self, error: Exception) -> HttpError:
        if isinstance(error, FaserError):
            return as_http_error(error)
        _log.error("request %s failed", self.request_id, exc_info=error)
        return internal_error(self.request_id)


async def _next(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


def _joined(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """All deltas of one choice as one delta."""
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


async def _merged(readers: Sequence[OutputReader]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(index of the reader, output) in the order in which outputs arrive. Raises what a reader raises."""
    if len(readers) == 1:
        async for output in readers[0]:
            yield 0, output
        return
    arrived: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue()
    pumps = [asyncio.create_task(_pump(index, reader, arrived)) for index, reader in enumerate(readers)]
    try:
        num_open = len(readers)
        while num_open:
            match await arrived.get():
                case None:
                    num_open -= 1
                case Exception() as error:
                    raise error
                case indexed_output:
                    yield indexed_output
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    index: int, reader: OutputReader, arrived: asyncio.Queue[tuple[int, RequestOutput] | Exception | None]
) -> None:
    """Move outputs from a reader to the queue; None marks the end of the reader."""
    try:
        async for output in reader:
            arrived.put_nowait((index, output))
        arrived.put_nowait(None)
    except Exception as error:
        arrived.put_nowait(error)
