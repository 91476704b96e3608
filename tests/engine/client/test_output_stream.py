"""What the engine says of a finished sample reaches its reader, and how long its tokens took."""

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest

from faser.engine.client.output_stream import OutputStream, Timing
from faser.engine.contract.plan import SequenceDelta
from faser.types.answer import (
    FinishReason,
    OutputDelta,
    RequestOutput,
    SequenceError,
    SpeculationSummary,
    StepTrace,
)
from faser.types.request import Request
from faser.types.sampling import SamplingParams
from tests.fake_engine import END, byte_tokenizer, position

SUMMARY = SpeculationSummary(policy="faser", steps=2, verified=3, accepted=1)


def stream_of(sampling: SamplingParams, *, shares_cache: bool = False) -> OutputStream:
    async def make() -> OutputStream:
        request = Request(request_id="r", prompt_token_ids=(1,), sampling=sampling, shares_cache=shares_cache)
        return OutputStream(request, byte_tokenizer(), lambda _: None)

    return asyncio.run(make())


def taken(stream: OutputStream, *deltas: SequenceDelta) -> RequestOutput:
    output = stream.take(list(deltas))
    assert output is not None
    return output


def said(text: str, *, index: int = 0, ends: bool = False, summary: SpeculationSummary | None) -> SequenceDelta:
    return SequenceDelta(
        request_id="r",
        index=index,
        token_ids=tuple(text.encode()),
        finish_reason=FinishReason.LENGTH if ends else None,
        speculation=summary,
    )


def test_the_summary_of_a_sample_comes_with_its_end() -> None:
    stream = stream_of(SamplingParams(n=2, max_tokens=4))
    first = taken(stream, said("ab", summary=None), said("a", index=1, ends=True, summary=SUMMARY))
    assert [each.speculation for each in first.deltas] == [None, SUMMARY]
    last = taken(stream, said("cd", ends=True, summary=SUMMARY))
    assert last.deltas[0].speculation == SUMMARY
    assert stream.speculation == [SUMMARY, SUMMARY]


def test_a_sample_that_a_stop_string_ends_has_the_summary_of_that_step() -> None:
    stream = stream_of(SamplingParams(stop=("X",), max_tokens=9))
    output = taken(stream, said("aXb", summary=SUMMARY))
    assert output.deltas[0].finish_reason is FinishReason.STOP
    assert output.deltas[0].speculation == SUMMARY


def test_a_running_summary_is_not_sent_before_the_end() -> None:
    stream = stream_of(SamplingParams(stop=("X",), max_tokens=9))
    assert taken(stream, said("ab", summary=SUMMARY)).deltas[0].speculation is None
    assert stream.speculation == []


def failed(token_ids: bytes, *, index: int = 0) -> SequenceDelta:
    return SequenceDelta(
        request_id="r",
        index=index,
        token_ids=tuple(token_ids),
        finish_reason=FinishReason.ERROR,
        error=SequenceError.NOT_FINITE,
    )


def test_tokens_before_an_error_reach_the_reader_and_text_that_is_held_back_stays_so() -> None:
    stream = stream_of(SamplingParams(stop=("XY",), max_tokens=9))
    output = taken(stream, failed(b"abX"))
    assert output.deltas == (OutputDelta(index=0, text="ab", token_ids=tuple(b"abX")),)
    assert stream.awaits(0)
    assert not stream.finished


def test_an_error_without_tokens_is_no_output() -> None:
    stream = stream_of(SamplingParams(max_tokens=9))
    assert stream.take([failed(b"")]) is None
    assert stream.awaits(0)


def test_a_stop_string_ends_a_sample_before_the_error_behind_it() -> None:
    stream = stream_of(SamplingParams(n=2, stop=("X",), max_tokens=9))
    output = taken(stream, failed(b"aXb"), said("c", index=1, summary=None))
    assert [(each.text, each.finish_reason) for each in output.deltas] == [("a", FinishReason.STOP), ("c", None)]
    assert (stream.awaits(0), stream.awaits(1)) == (False, True)


def spoken(
    token_ids: bytes | tuple[int, ...], reason: FinishReason, *, cuts: tuple[int, ...]
) -> list[SequenceDelta]:
    """The tokens in the steps that begin at the cuts; the last step has the reason."""
    bounds = [0, *cuts, len(token_ids)]
    return [
        SequenceDelta(
            request_id="r",
            index=0,
            token_ids=tuple(token_ids[begin:end]),
            logprobs=tuple(position(each, 2) for each in token_ids[begin:end]),
            prompt_logprobs=(None,) if begin == 0 else None,
            finish_reason=reason if end == len(token_ids) else None,
            speculation=SUMMARY,
        )
        for begin, end in pairwise(bounds)
    ]


@pytest.mark.parametrize(
    "token_ids, reason, stop",
    [
        (b"plain", FinishReason.LENGTH, ()),
        ("Größe 🙂!".encode(), FinishReason.LENGTH, ()),
        ((*b"told", END), FinishReason.STOP, ()),
        (b"a stop in here", FinishReason.LENGTH, ("top i",)),
        (b"a stop at the end", FinishReason.LENGTH, ("end",)),
        (b"a stop begun sto", FinishReason.LENGTH, ("stop!",)),
    ],
)
@pytest.mark.parametrize("cuts", [(), (1,), (2, 3), (1, 4)])
def test_the_outputs_of_a_shared_cache_do_not_show_what_a_step_accepted(
    token_ids: bytes | tuple[int, ...], reason: FinishReason, stop: tuple[str, ...], cuts: tuple[int, ...]
) -> None:
    """Oracle: one token a step, as without drafts."""
    sampling = SamplingParams(stop=stop, max_tokens=99, logprobs=2, prompt_logprobs=0)

    def shown(cuts: tuple[int, ...], *, shares_cache: bool) -> list[OutputDelta]:
        stream = stream_of(sampling, shares_cache=shares_cache)
        outputs = [stream.take([delta]) for delta in spoken(token_ids, reason, cuts=cuts)]
        assert outputs[0] is not None
        assert outputs[0].prompt_logprobs == (None,)
        return [delta for output in outputs if output is not None for delta in output.deltas]

    plain = shown(tuple(range(1, len(token_ids))), shares_cache=False)
    assert shown(cuts, shares_cache=True) == plain
    assert len(shown(cuts, shares_cache=False)) <= len(cuts) + 1 < len(plain)


def test_time_per_token_is_that_of_the_slowest_sample() -> None:
    timing = Timing(arrival_s=0.0)
    assert timing.tpot_s is None
    timing.first_token_s = 1.0
    timing.last_token_s = {0: 1.0, 1: 3.0, 2: 2.0}
    timing.num_tokens.update({0: 1, 1: 5, 2: 2})
    assert timing.tpot_s == 1.0


def test_one_token_has_no_time_per_further_token() -> None:
    timing = Timing(arrival_s=0.0)
    timing.first_token_s = 1.0
    timing.last_token_s = {0: 1.0}
    timing.num_tokens.update({0: 1})
    assert timing.tpot_s is None


@pytest.mark.parametrize("stop", [(), ("lo w",), ("Zz",)])
@pytest.mark.parametrize("cuts", [(), (1,), (3, 4, 9), (2, 11)])
def test_a_trace_divides_the_text_among_the_tokens_and_changes_none_of_it(
    cuts: tuple[int, ...], stop: tuple[str, ...]
) -> None:
    """Oracle: the same deltas without a trace."""
    token_ids = tuple("Hé llo wörld €!".encode())  # a token is a byte
    ends = [*(each for each in cuts), len(token_ids)]

    def shown(trace: StepTrace | None) -> list[OutputDelta]:
        stream = stream_of(SamplingParams(stop=stop, max_tokens=99))
        found: list[OutputDelta] = []
        begin = 0
        for end in ends:
            last = end == len(token_ids)
            step = SequenceDelta(
                request_id="r",
                index=0,
                token_ids=(*token_ids[begin:end], *[END] * last),
                finish_reason=FinishReason.STOP if last else None,
                trace=trace,
            )
            output = stream.take([step])
            found += [] if output is None else output.deltas
            begin = end
        return found

    plain, traced = shown(None), shown(StepTrace(drafter="ngram", gamma=4, accepted=2))
    assert [replace(each, trace=None) for each in traced] == plain
    for each in traced:
        assert each.trace is not None
        assert "".join(each.trace.texts) == each.text
        assert len(each.trace.texts) == len(each.token_ids)


def test_a_request_that_shares_past_answers_has_no_trace() -> None:
    """The front-end refuses to trace it; if that fails, nothing is sent either."""
    stream = stream_of(SamplingParams(max_tokens=9), shares_cache=True)
    for text in ("abc", "d"):
        traced = replace(said(text, summary=None), trace=StepTrace(drafter="suffix", gamma=2, accepted=2))
        assert [each.trace for each in taken(stream, traced).deltas] == [None] * len(text)
