"""What the engine says of a finished sample reaches its reader, and how long its tokens took."""

import asyncio

from faser.engine.client.output_stream import OutputStream, Timing
from faser.engine.contract.plan import SequenceDelta
from faser.types import FinishReason, Request, RequestOutput, SamplingParams, SpeculationSummary
from tests.fake_engine import byte_tokenizer

SUMMARY = SpeculationSummary(policy="faser", steps=2, verified=3, accepted=1)


def stream_of(sampling: SamplingParams) -> OutputStream:
    async def make() -> OutputStream:
        request = Request(request_id="r", prompt_token_ids=(1,), sampling=sampling)
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


def test_a_running_summary_is_not_told_before_the_end() -> None:
    stream = stream_of(SamplingParams(stop=("X",), max_tokens=9))
    assert taken(stream, said("ab", summary=SUMMARY)).deltas[0].speculation is None
    assert stream.speculation == []


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
