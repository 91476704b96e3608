"""A stretch of a trace keeps its shape in another time: gaps relative to each other, lengths, the order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ablation.drive import Trace, firsts, mean_length, requests_of, stretch
from faser.errors import ConfigError

PROMPTS = [(1,), (2, 2), (3, 3, 3)]
TRACE: Trace = ((0.0, 10, 5), (1.0, 20, 80), (4.0, 30, 7), (4.0, 40, 0), (10.0, 50, 9), (30.0, 60, 3))


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    gaps = draw(st.lists(st.floats(0.001, 100), min_size=3, max_size=40))
    lengths = draw(st.lists(st.integers(0, 900), min_size=len(gaps), max_size=len(gaps)))
    return [(float(at_s), 5, length) for at_s, length in zip(np.cumsum(gaps), lengths, strict=True)]


@given(trace=traces(), seconds=st.floats(0.5, 500), data=st.data())
def test_gaps_keep_their_proportions_and_all_requests_come_in_time(
    trace: Trace, seconds: float, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, len(trace) - 2))
    count = data.draw(st.integers(1, len(trace) - first - 1))
    found = stretch(trace, PROMPTS, first=first, count=count, seconds=seconds, max_tokens=64)
    times = np.array([ask.at_s for ask in found.asks] + [seconds])
    recorded = np.array([at_s for at_s, _, _ in trace[first : first + count + 1]])
    assert times[0] == 0.0
    assert np.diff(times) == pytest.approx(np.diff(recorded) / found.pace, rel=1e-6, abs=1e-9 * seconds)
    assert all(0 <= at_s < seconds for at_s in times[:-1])


def test_lengths_are_those_of_the_trace_up_to_the_cap_and_at_least_one_token() -> None:
    found = stretch(TRACE, PROMPTS, first=0, count=5, seconds=3.0, max_tokens=8)
    assert [ask.output_tokens for ask in found.asks] == [5, 8, 7, 1, 8]
    assert found.output_tokens == 29


def test_times_of_a_stretch_by_hand() -> None:
    found = stretch(TRACE, PROMPTS, first=1, count=3, seconds=3.0, max_tokens=8)
    assert [ask.at_s for ask in found.asks] == [0.0, 1.0, 1.0]
    assert found.pace == 3.0


def test_prompts_come_in_turn_by_the_number_in_the_trace() -> None:
    found = stretch(TRACE, PROMPTS, first=1, count=4, seconds=3.0, max_tokens=8)
    assert [ask.prompt_token_ids for ask in found.asks] == [(2, 2), (3, 3, 3), (1,), (2, 2)]
    assert [ask.seed for ask in found.asks] == [1, 2, 3, 4]


def test_a_stretch_beyond_the_trace_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"6 requests from number 0.*has 6"):
        stretch(TRACE, PROMPTS, first=0, count=6, seconds=3.0, max_tokens=8)


def test_requests_that_came_at_once_have_no_pace() -> None:
    with pytest.raises(ConfigError, match="requests 2 to 3 of the trace came at the same time"):
        stretch(TRACE, PROMPTS, first=2, count=1, seconds=3.0, max_tokens=8)


def test_stretches_are_spread_from_one_end_of_the_trace_to_the_other() -> None:
    trace = [(float(i), 1, 1) for i in range(101)]
    assert firsts(trace, 3, 20) == [0, 40, 80]
    assert firsts(trace, 1, 20) == [0]
    stretch(trace, PROMPTS, first=80, count=20, seconds=1.0, max_tokens=1)


def test_a_trace_too_short_for_a_repeat_is_refused() -> None:
    with pytest.raises(ConfigError, match="50 requests"):
        firsts(TRACE, 2, 50)


def test_as_many_requests_as_bring_the_tokens() -> None:
    assert mean_length(TRACE, 8) == pytest.approx(np.mean([5, 8, 7, 0, 8, 3]))
    assert requests_of(TRACE, tokens_per_s=31 / 6, seconds=12.0, max_tokens=8) == 12
    assert requests_of(TRACE, tokens_per_s=0.001, seconds=1.0, max_tokens=8) == 1
