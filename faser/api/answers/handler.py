"""GenerationHandler: runs the engine requests of one HTTP request and writes the answer.

Submits the requests, gathers or streams their outputs, counts tokens, and aborts when the client disconnects.
How a choice looks is the formatter's part, what stands around it the framing's.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from faser.api.answers.framing import AnswerFormatter, AnswerFraming, ChoiceState, Envelope
from faser.api.answers.usage import SpeculationReport, Usage
from faser.api.bodies.errors import HttpError, as_http_error, internal_error
from faser.api.middleware.key_limits import use_tokens
from faser.api.middleware.outer import get_request_id
from faser.api.middleware.tracing import trace_of
from faser.api.requests.prompts import TokenizedPrompt
from faser.api.requests.service import OutputReader, Service
from faser.errors import FaserError
from faser.optional import present
from faser.types.answer import OutputDelta, RequestOutput
from faser.types.request import Request

_T = TypeVar("_T")

# Proxies must forward each event at once.
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_log = logging.getLogger("faser.api")


@dataclass(slots=True, kw_only=True)
class GenerationHandler:
    """One HTTP request, checked and tokenised.

    requests: one per prompt, each for n samples. Choices are numbered by prompt, then by sample.
    streams: the answer is a stream; otherwise it is one JSON document.
    predicted: token ids of the body's prediction; None: the body has none.
    readers: of the requests' outputs, once the engine has accepted them.
    """

    service: Service
    scope: Scope
    requests: tuple[Request, ...]
    prompts: tuple[TokenizedPrompt, ...]
    formatter: AnswerFormatter
    envelope: Envelope
    framing: AnswerFraming
    streams: bool
    predicted: tuple[int, ...] | None = None
    readers: Sequence[OutputReader] = ()
    states: list[ChoiceState] = field(init=False)
    usage: Usage = field(init=False)

    def __post_init__(self) -> None:
        first, settings = self.requests[0], self.service.settings
        n = first.sampling.n
        self.states = [
            ChoiceState(index=prompt_index * n + sample, prompt=prompt)
            for prompt_index, prompt in enumerate(self.prompts)
            for sample in range(n)
        ]
        self.usage = Usage(
            [len(prompt.token_ids) for prompt in self.prompts],
            predicted=self.predicted,
            shares_cache=first.shares_cache and not settings.has_one_user,
            on_tokens=partial(use_tokens, self.scope),
            speculation=SpeculationReport(
                first.speculation,
                num_choices=len(self.states),
                level=settings.spec_decode_metrics,
                cap=settings.speculation.cap,
                shares_cache=first.shares_cache,
            ),
        )

    async def respond(self, receive: Receive) -> Response:
        """The HTTP answer. A failure before the first token is raised, so that it has its own HTTP status.

        Raises FaserError, or ClientDisconnect. In both cases all requests have been aborted.
        """
        if not self.streams:
            body = await while_connected(self._json_answer(), receive)
            return Response(body, media_type="application/json")
        events = self._events()
        first = await while_connected(_next(events), receive)
        return EventStream(first, events)

    async def _json_answer(self) -> bytes:
        """The whole answer as JSON."""
        deltas: list[list[OutputDelta]] = [[] for _ in self.states]
        async with self._outputs() as outputs:
            async for prompt_index, output in outputs:
                for state, delta in self._take(prompt_index, output):
                    deltas[state.index].append(delta)
        choices = []
        for state, own in zip(self.states, deltas, strict=True):
            choice = self.formatter.choice(state, _joined(own))
            self.usage.count_reasoning(state.index, state.num_reasoning_tokens)
            state.finish_reason = choice["finish_reason"]
            choices.append(choice)
        return msgspec.json.encode(self.framing.document(choices, self.states, self.usage))

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """The events of a stream; those of one engine step come joined. Raises only before the first event."""
        started = False
        try:
            async with self._outputs() as outputs:
                async for prompt_index, output in outputs:
                    events = [self._chunks(*each) for each in self._take(prompt_index, output)]
                    if any(events):
                        started = True
                        yield b"".join(events)
        except Exception as error:
            if not started:
                raise
            answer = self._as_http_error(error)
            if (trace := trace_of(self.scope)) is not None:
                trace.late_status = answer.status
            yield self.framing.failure(answer)
            return
        yield self.framing.end(self.usage)

    @asynccontextmanager
    async def _outputs(self) -> AsyncIterator[AsyncGenerator[tuple[int, RequestOutput], None]]:
        """(index of the prompt, output) in the order of arrival. Exiting aborts what is unfinished."""
        async with (
            self.service.submitted(self.requests, field=self.formatter.prompt_field) as readers,
            aclosing(merged(readers)) as outputs,
        ):
            self.readers = readers
            if self.service.settings.per_request_metrics and len(self.states) == 1:
                self.usage.timing = readers[0].timing
            self.usage.count_prompts()
            yield outputs

    def _take(self, prompt_index: int, output: RequestOutput) -> Iterator[tuple[ChoiceState, OutputDelta]]:
        """Count what one step adds to a prompt's samples. Each delta comes with its choice."""
        self.usage.count_cached(prompt_index, output.num_cached_tokens)
        n = self.requests[prompt_index].sampling.n
        states = self.states[prompt_index * n : (prompt_index + 1) * n]
        if output.prompt_logprobs is not None:
            for state in states:
                state.prompt_logprobs = output.prompt_logprobs
        for delta in output.deltas:
            state = states[delta.index]
            self.usage.count(state.index, delta)
            yield state, delta

    def _chunks(self, state: ChoiceState, delta: OutputDelta) -> bytes:
        """The events of one delta."""
        chunks = self.formatter.chunks(state, delta)
        if delta.is_last:
            state.finish_reason = chunks[-1]["finish_reason"]
        self.usage.count_reasoning(state.index, state.num_reasoning_tokens)
        return self.framing.events(chunks, self.usage)

    def _as_http_error(self, error: Exception) -> HttpError:
        if isinstance(error, FaserError):
            return as_http_error(error)
        request_id = get_request_id(self.scope)
        _log.error("request %s failed", request_id, exc_info=error)
        return internal_error(request_id)


async def _next(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


def _joined(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """All deltas of one choice as one delta."""
    last = deltas[-1]
    reports = present(delta.logprobs for delta in deltas)
    return OutputDelta(
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=tuple(position for report in reports for position in report) if reports else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )


async def merged(readers: Sequence[OutputReader]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
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


class EventStream(StreamingResponse):
    """Sends events until they end or the client disconnects; either closes their generator at once."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        """first: the first events, already taken from the generator. rest: the generator."""
        super().__init__(_after(first, rest), media_type="text/event-stream", headers=STREAM_HEADERS)
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
