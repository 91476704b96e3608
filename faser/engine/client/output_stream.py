"""OutputStream: the outputs of one request, from the engine's token ids to text.

Owns the detokenizers and the queue between the engine's messages and the reader. Finds stop strings, which exist
only in text, and then aborts the sample in the engine.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Self

from faser.engine.client.traffic import RequestTraffic, TrafficRecorder
from faser.engine.contract.plan import SequenceDelta
from faser.engine.text.detokenizer import DetokenizedText, Detokenizer
from faser.engine.text.tokenizer import Tokenizer
from faser.errors import FaserError
from faser.optional import present
from faser.types.answer import FinishReason, OutputDelta, PositionLogprobs, RequestOutput, SpeculationSummary
from faser.types.request import Request


class Timing:
    """Times of one request, in seconds of time.monotonic(), and what else its metrics count."""

    def __init__(self, *, arrival_s: float) -> None:
        self.arrival_s = arrival_s
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: dict[int, float] = {}
        self.num_tokens: Counter[int] = Counter()  # by sample
        self.num_preemptions: dict[int, int] = {}
        self.num_cached_tokens = 0  # of the prompt

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first, of the slowest sample; None: no sample has two tokens."""
        first_s = self.first_token_s
        if first_s is None:
            return None
        means = [
            (self.last_token_s[index] - first_s) / (count - 1)
            for index, count in self.num_tokens.items()
            if count > 1
        ]
        return max(means, default=None)


class OutputStream:
    """One output per engine step that added to the request. Exiting the context early aborts the request."""

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        abort: Callable[[int | None], None],
        recorder: TrafficRecorder | None = None,
    ) -> None:
        """abort: called with the sample that ends; None: all. recorder: gets the answers that may be kept."""
        sampling = request.sampling
        self.request = request
        self.finished = False
        self.timer: asyncio.TimerHandle | None = None  # ends the request at its deadline
        self._abort = abort
        self._outputs: asyncio.Queue[RequestOutput | FaserError] = asyncio.Queue()
        self._detokenizers = {
            index: Detokenizer(
                tokenizer,
                stop=sampling.stop,
                include_stop=sampling.include_stop_str_in_output,
                skip_special_tokens=sampling.skip_special_tokens,
                prompt_token_ids=request.prompt_token_ids,
                min_tokens=sampling.min_tokens,
            )
            for index in range(sampling.n)
        }
        self.timing = Timing(arrival_s=request.arrival_s)
        self._traffic = RequestTraffic(request, recorder)
        self.speculation: list[SpeculationSummary] = []  # of the samples that have ended

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        """Raises RequestError, DeadlineError, EngineError or NotReadyError if the request ends that way."""
        if self.finished and self._outputs.empty():
            raise StopAsyncIteration
        output = await self._outputs.get()
        if isinstance(output, FaserError):
            raise output
        return output

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort the samples that have not finished. Idempotent."""
        if not self.finished:
            self.finished = True
            self._abort(None)

    def take(self, deltas: list[SequenceDelta]) -> RequestOutput | None:
        """Convert one step's deltas to text and queue them. None: there is nothing for the reader."""
        for delta in deltas:
            self.timing.num_preemptions[delta.index] = delta.num_preemptions
        self.timing.num_cached_tokens = max(self.timing.num_cached_tokens, deltas[0].num_cached_tokens)
        if self.request.shares_cache:
            deltas = [each for delta in deltas for each in _by_token(delta)]
        converted = tuple(present(map(self._convert, deltas)))
        if not converted:
            return None
        output = RequestOutput(
            request_id=self.request.request_id,
            deltas=converted,
            num_cached_tokens=deltas[0].num_cached_tokens,
            prompt_logprobs=deltas[0].prompt_logprobs,
        )
        for each in converted:
            self._traffic.add(each)
        self.speculation += present(each.speculation for each in converted)
        self.finished = not self._detokenizers
        self._outputs.put_nowait(output)
        return output

    def awaits(self, index: int) -> bool:
        """Return whether this sample has not ended."""
        return index in self._detokenizers

    def fail(self, error: FaserError) -> None:
        self.finished = True
        self._outputs.put_nowait(error)

    def _convert(self, delta: SequenceDelta) -> OutputDelta | None:
        detokenizer = self._detokenizers.get(delta.index)
        if detokenizer is None:
            return None  # a stop string ended the sample; the engine had not yet received the abort
        if delta.finish_reason is FinishReason.ERROR:  # the text stays as it is, and `fail` follows
            delta = replace(delta, finish_reason=None)
            if not delta.token_ids:
                return None
        visible, finished = self._visible_tokens(delta), delta.finish_reason is not None
        trace = delta.trace
        if trace is None:
            detokenized = detokenizer.push(visible, finished=finished)
        else:
            detokenized, texts = _push_one_by_one(detokenizer, visible, finished=finished)
        num_tokens = len(delta.token_ids) if detokenized.stop is None else detokenized.num_tokens
        finish_reason = delta.finish_reason
        stop_reason: int | str | None = delta.stop_reason
        logprobs: tuple[PositionLogprobs, ...] | None = delta.logprobs
        if detokenized.stop is not None:
            if finish_reason is None:
                self._abort(delta.index)
            finish_reason, stop_reason = FinishReason.STOP, detokenized.stop
            logprobs = None if logprobs is None else logprobs[:num_tokens]
        if finish_reason is not None:
            del self._detokenizers[delta.index]
        if trace is not None:
            hidden = num_tokens - len(texts)  # the token that ends the sample
            trace = replace(trace, texts=(*texts, *[""] * hidden))
        return OutputDelta(
            index=delta.index,
            text=detokenized.text,
            token_ids=delta.token_ids[:num_tokens],
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            speculation=None if finish_reason is None else delta.speculation,
            trace=trace,
        )

    def _visible_tokens(self, delta: SequenceDelta) -> tuple[int, ...]:
        """The tokens whose text is visible. A token that ends the sample is hidden like a stop string."""
        ended_by_token = delta.finish_reason is FinishReason.STOP
        hides_last = ended_by_token and not self.request.sampling.include_stop_str_in_output
        return delta.token_ids[:-1] if hides_last else delta.token_ids


def _push_one_by_one(
    detokenizer: Detokenizer, token_ids: tuple[int, ...], *, finished: bool
) -> tuple[DetokenizedText, list[str]]:
    """The same as one push of all tokens, and the text that each of them makes visible."""
    if not token_ids:
        pushed = detokenizer.push((), finished=finished)
        return pushed, [pushed.text]
    texts: list[str] = []
    for taken, token_id in enumerate(token_ids, start=1):
        pushed = detokenizer.push((token_id,), finished=finished and taken == len(token_ids))
        texts.append(pushed.text)
        if pushed.stop is not None:
            break
    return DetokenizedText(text="".join(texts), stop=pushed.stop, num_tokens=taken), texts


def _by_token(delta: SequenceDelta) -> Iterator[SequenceDelta]:
    """Yield a delta for each token, as if each had come in a step of its own."""
    last = len(delta.token_ids) - 1
    if last < 1:
        yield delta if delta.trace is None else replace(delta, trace=None)
        return
    for at, token_id in enumerate(delta.token_ids):
        yield replace(
            delta,
            trace=None,
            token_ids=(token_id,),
            logprobs=None if delta.logprobs is None else delta.logprobs[at : at + 1],
            prompt_logprobs=delta.prompt_logprobs if at == 0 else None,
            finish_reason=delta.finish_reason if at == last else None,
            stop_reason=delta.stop_reason if at == last else None,
        )
