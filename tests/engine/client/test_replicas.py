"""Where requests go, and what becomes of those whose replica ends. The engines are fakes.

Planted bugs that these tests have caught: a prefix that draws all requests to one replica; a second try after the
first output; samples that stay counted after an abort; a namespace that is left out of what was seen.
"""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from faser.engine.client.async_engine import AsyncEngine
from faser.engine.client.output_stream import Timing
from faser.engine.client.replicas import Replicas
from faser.errors import EngineDiedError, NotReadyError, OverloadError, RequestError
from faser.metrics.replicas import ReplicaMetrics
from faser.metrics.server import Metrics
from faser.types.adapter import Adapter
from faser.types.answer import OutputDelta, RequestOutput
from faser.types.engine import EngineState
from faser.types.request import Request, Slo, SpeculationParams
from faser.types.sampling import SamplingParams
from faser.types.statistics import EngineStats

OUTPUTS = 3
DIED = EngineDiedError("the engine died (signal 9)")


class FakeStream:
    """Three outputs, then the end. dies_after: the number of outputs before its engine dies; None: it does not."""

    def __init__(self, request: Request, dies_after: int | None) -> None:
        self.timing = Timing(arrival_s=request.arrival_s)
        self.closed = False
        self._request, self._given, self._dies_after = request, 0, dies_after

    def __aiter__(self) -> "FakeStream":
        return self

    async def __anext__(self) -> RequestOutput:
        await asyncio.sleep(0)
        if self._given == self._dies_after:
            raise DIED
        if self._given == OUTPUTS:
            raise StopAsyncIteration
        self._given += 1
        delta = OutputDelta(index=0, text=str(self._given), token_ids=(self._given,))
        return RequestOutput(request_id=self._request.request_id, deltas=(delta,), num_cached_tokens=0)

    def close(self) -> None:
        self.closed = True


class FakeReplica:
    """refuses: the error of every submission; None: it takes requests, whose streams end as dies_after says."""

    def __init__(self) -> None:
        self.state, self.state_reason = EngineState.READY, ""
        self.stats = EngineStats(num_running=2, kv_usage=0.5, num_steps=7)
        self.max_samples = 8
        self.refuses: Exception | None = None
        self.dies_after: int | None = None
        self.falls_short = 0
        self.asked: list[Request] = []
        self.streams: list[FakeStream] = []

    def shortfall(self, _: Request) -> int:
        return self.falls_short

    def submit(self, request: Request, *, num_following: int) -> FakeStream:
        assert num_following == 0
        if self.refuses is not None:
            raise self.refuses
        self.asked.append(request)
        self.streams.append(FakeStream(request, self.dies_after))
        return self.streams[-1]


def replicas(count: int) -> tuple[Replicas, list[FakeReplica]]:
    fakes = [FakeReplica() for _ in range(count)]
    return Replicas([cast(AsyncEngine, each) for each in fakes]), fakes


def request(number: int, prompt: tuple[int, ...] = (), **fields: Any) -> Request:
    sampling = SamplingParams(max_tokens=4, n=fields.pop("n", 1))
    tokens = prompt or tuple(range(1000 * number, 1000 * number + 130))
    return Request(request_id=str(number), prompt_token_ids=tokens, sampling=sampling, arrival_s=0.0, **fields)


async def texts(stream: Any) -> str:
    async with stream:
        return "".join([output.deltas[0].text async for output in stream])


def counts(fakes: list[FakeReplica]) -> list[int]:
    return [len(each.asked) for each in fakes]


def test_requests_go_to_the_replica_with_the_least_to_do() -> None:
    both, fakes = replicas(3)
    held = [both.submit(request(number)) for number in range(6)]
    assert counts(fakes) == [2, 2, 2]
    asyncio.run(texts(held[4]))
    both.submit(request(7))
    assert counts(fakes) == [2, 3, 2]
    both.submit(request(8, n=3))
    both.submit(request(9))
    assert counts(fakes) == [3, 4, 2]


def test_a_prompt_goes_where_its_beginning_has_been() -> None:
    both, fakes = replicas(3)
    system = tuple(range(200))
    for number in range(3):
        asyncio.run(texts(both.submit(request(number))))
    for number in range(10, 18):
        asyncio.run(texts(both.submit(request(number, (*system, number)))))
    (home,) = [each for each in fakes if any(one.prompt_token_ids[:200] == system for one in each.asked)]
    assert len(home.asked) >= 8
    home.state = EngineState.RESTARTING
    asyncio.run(texts(both.submit(request(30, (*system, 30)))))
    assert home.asked[-1].request_id != "30"
    assert any(each.asked[-1].request_id == "30" for each in fakes if each.asked and each is not home)


def test_no_class_is_given_up_where_another_replica_can_keep_its_targets() -> None:
    """The first in order is asked only if none is better; without targets nothing is asked."""
    three, fakes = replicas(3)
    slo = SpeculationParams(class_name="chat", slo=Slo(ttft_ms=200), admission="batch")
    fakes[0].falls_short, fakes[1].falls_short, fakes[2].falls_short = 2, 1, 0
    three.submit(request(1, speculation=slo))
    assert counts(fakes) == [0, 0, 1]
    fakes[2].falls_short = 3
    three.submit(request(2, speculation=slo))
    assert counts(fakes) == [0, 1, 1]
    fakes[1].refuses = OverloadError("the queue is full")
    three.submit(request(3, speculation=slo))
    assert counts(fakes) == [1, 1, 1]
    three.submit(request(4))
    assert sum(counts(fakes)) == 4
    for each in fakes:
        each.falls_short, each.refuses = 2, None
    three.submit(request(5, speculation=slo))  # all fall short alike: the order is as without targets
    assert sum(counts(fakes)) == 5


ADAPTERS = [Adapter(name=name, path=name, digest=2 * name) for name in "ab"]


@pytest.mark.parametrize(
    "first, second",
    [({"cache_salt": "a"}, {"cache_salt": "b"}), ({"adapter": ADAPTERS[0]}, {"adapter": ADAPTERS[1]})],
)
def test_a_beginning_of_another_namespace_is_another_one(first: dict[str, Any], second: dict[str, Any]) -> None:
    both, fakes = replicas(2)
    asyncio.run(texts(both.submit(request(1, tuple(range(200)), **first))))
    held = both.submit(request(2))  # the other replica now has as much to do as that one, had it not ended
    asyncio.run(texts(both.submit(request(3, tuple(range(200)), **second))))
    asyncio.run(texts(both.submit(request(4, tuple(range(200)), **first))))
    of_four = next(each for each in fakes if any(one.request_id == "4" for one in each.asked))
    assert any(one.request_id == "1" for one in of_four.asked)
    assert held is not None


def test_a_beginning_does_not_draw_more_than_a_replica_can_do() -> None:
    both, fakes = replicas(2)
    system = tuple(range(200))
    held = [both.submit(request(number, (*system, number))) for number in range(40)]
    assert len(held) == 40
    assert min(counts(fakes)) >= 14
    assert sum(counts(fakes)) == 40


def test_a_request_goes_on_elsewhere_if_its_replica_ends_before_its_first_output() -> None:
    both, fakes = replicas(2)
    fakes[0].dies_after = 0
    assert asyncio.run(texts(both.submit(request(1)))) == "123"
    assert counts(fakes) == [1, 1]
    fakes[1].dies_after = 0
    with pytest.raises(EngineDiedError, match="signal 9"):
        asyncio.run(texts(both.submit(request(2))))
    assert [each.num_samples for each in both._replicas] == [0, 0]


def test_after_the_first_output_the_end_of_the_replica_is_that_of_the_request() -> None:
    both, fakes = replicas(2)
    fakes[0].dies_after = 1
    with pytest.raises(EngineDiedError, match="signal 9"):
        asyncio.run(texts(both.submit(request(1))))
    assert counts(fakes) == [1, 0]


def test_a_full_replica_is_passed_over_and_a_request_that_cannot_be_served_is_not() -> None:
    both, fakes = replicas(2)
    fakes[0].refuses = OverloadError("the queue is full", retry_after_s=9)
    assert asyncio.run(texts(both.submit(request(1)))) == "123"
    fakes[1].refuses = OverloadError("the queue is full too")
    with pytest.raises(OverloadError, match="the queue is full"):
        both.submit(request(2))
    fakes[0].refuses = RequestError("the prompt is empty")
    with pytest.raises(RequestError, match="empty"):
        both.submit(request(3))
    for each in fakes:
        each.state, each.state_reason = EngineState.RESTARTING, "signal 9"
    with pytest.raises(NotReadyError, match="restarting: signal 9"):
        both.submit(request(4))


def test_an_aborted_request_is_one_less() -> None:
    both, fakes = replicas(1)

    async def begin_and_leave() -> None:
        async with both.submit(request(1, n=2)) as stream:
            await anext(stream)
            assert both._replicas[0].num_samples == 2

    asyncio.run(begin_and_leave())
    assert both._replicas[0].num_samples == 0
    assert fakes[0].streams[0].closed


@pytest.mark.parametrize(
    "states, joint",
    [
        ((EngineState.DEAD, EngineState.READY), EngineState.READY),
        ((EngineState.RESTARTING, EngineState.LOADING), EngineState.LOADING),
        ((EngineState.DEAD, EngineState.RESTARTING), EngineState.RESTARTING),
        ((EngineState.DEAD, EngineState.DEAD), EngineState.DEAD),
    ],
)
def test_together_they_are_in_the_state_of_the_best(states: tuple[EngineState, ...], joint: EngineState) -> None:
    both, fakes = replicas(2)
    for each, state in zip(fakes, states, strict=True):
        each.state, each.state_reason = state, state.value
    assert (both.state, both.state_reason) == (joint, joint.value)
    assert both.stats == EngineStats(num_running=4, kv_usage=0.5, num_steps=14)


def test_the_series_of_all_replicas_are_one_page() -> None:
    each = [Metrics(model_name="tiny", max_model_len=64, engine=str(number)) for number in range(2)]
    for number, metrics in enumerate(each):
        metrics.engine(replace(EngineStats(), num_running=3 + number))
    joined = ReplicaMetrics(each)
    joined.rejected("queue_full")
    text = joined.render().decode()
    assert max(Counter(line for line in text.splitlines() if line.startswith("# HELP")).values()) == 1
    found = {
        sample.labels["engine"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "vllm:num_requests_running"
    }
    assert found == {"0": 3.0, "1": 4.0}
