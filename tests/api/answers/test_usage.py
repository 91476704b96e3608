"""A prediction reaches the engine as tokens, and its fate comes back in the usage. Answers tell their times."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.api.answers.usage import PredictionUsage, times_json
from faser.engine.client.output_stream import Timing
from tests.api.server import http_client, serving, settings
from tests.fake_engine import MAX_MODEL_LEN, FakeEngine, saying

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def predicting(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": HI, "prediction": {"type": "content", "content": content}, **fields}


@pytest.mark.parametrize(
    "content", ["Hell yes", [{"type": "text", "text": "Hell"}, {"type": "text", "text": " yes"}]]
)
def test_what_the_answer_repeats_is_accepted_and_the_rest_rejected(
    http: httpx.Client, engine: FakeEngine, content: Any
) -> None:
    """The answer is Hello! and a token is a byte: of the eight predicted ones it has four, in a row."""
    details = http.post(CHAT, json=predicting(content)).json()["usage"]["completion_tokens_details"]
    assert details == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 4,
        "rejected_prediction_tokens": 4,
    }
    assert bytes(engine.requests[-1].predicted_token_ids) == b"Hell yes"


def test_every_prompt_and_sample_has_the_prediction(http: httpx.Client, engine: FakeEngine) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "prediction": {"type": "content", "content": "Hello?"}}
    usage = http.post(TEXT, json=body).json()["usage"]["completion_tokens_details"]
    assert (usage["accepted_prediction_tokens"], usage["rejected_prediction_tokens"]) == (4 * 5, 4 * 1)
    assert [bytes(each.predicted_token_ids) for each in engine.requests] == [b"Hello?"] * 2


def test_a_stream_reports_the_fate_as_well(http: httpx.Client) -> None:
    body = predicting("Hello", stream=True, stream_options={"include_usage": True})
    assert '"accepted_prediction_tokens":5' in http.post(CHAT, json=body).text


def test_without_a_prediction_there_is_no_fate(http: httpx.Client, engine: FakeEngine) -> None:
    details = http.post(CHAT, json={"messages": HI, "prediction": None}).json()["usage"]
    assert details["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert engine.requests[-1].predicted_token_ids == ()


@pytest.mark.parametrize(
    "prediction, param",
    [
        ({"type": "content", "content": "x" * (MAX_MODEL_LEN + 1)}, "prediction"),
        ({"type": "content", "content": "x" * 10_000_000}, "prediction"),
        ({"type": "text", "content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": "x", "length": 3}, "prediction.length"),
        ("x", "prediction"),
    ],
)
def test_a_prediction_that_cannot_be_is_refused_by_name(
    http: httpx.Client, engine: FakeEngine, prediction: Any, param: str
) -> None:
    answer = http.post(CHAT, json={"messages": HI, "prediction": prediction})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not engine.requests


_TOKENS = st.lists(st.integers(0, 2), max_size=12)


@given(predicted=_TOKENS, answers=st.lists(st.lists(_TOKENS, max_size=4), max_size=3))
def test_the_fate_is_that_of_every_place_of_the_prediction(
    predicted: list[int], answers: list[list[list[int]]]
) -> None:
    """Oracle: for every place, all runs around it, looked for in the whole answer. Answers come in pieces."""
    fate = PredictionUsage(tuple(predicted))
    run = max(1, min(3, len(predicted)))
    accepted = 0
    for name, pieces in enumerate(answers):
        for piece in pieces:
            fate.take(name, piece)
        said = [token_id for piece in pieces for token_id in piece]
        runs = [said[at : at + run] for at in range(len(said) - run + 1)]
        for place in range(len(predicted)):
            around = range(max(0, place - run + 1), min(place, len(predicted) - run) + 1)
            accepted += any(predicted[first : first + run] in runs for first in around)
    assert fate.accepted == accepted
    spoken = sum(bool(pieces) for pieces in answers)
    assert fate.rejected == spoken * len(predicted) - accepted


TIMES = ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second")


def test_times_are_those_of_the_request_in_vllms_units() -> None:
    timing = Timing(arrival_s=10.0)
    assert times_json(timing, 0) == {}
    timing.scheduled_s, timing.first_token_s, timing.last_token_s = 10.5, 10.75, {0: 12.75}
    assert times_json(timing, 9) == {
        "time_to_first_token_ms": 250.0,
        "generation_time_ms": 2000.0,
        "queue_time_ms": 500.0,
        "mean_itl_ms": 250.0,
        "tokens_per_second": 4.0,
    }
    assert "mean_itl_ms" not in times_json(timing, 1)
    timing.last_token_s = {0: 10.5}
    assert "tokens_per_second" not in times_json(timing, 1)


@pytest.fixture(scope="module")
def timed() -> Iterator[httpx.Client]:
    engine = FakeEngine()
    engine.script, engine.step_s = saying("Hello!"), 0.001
    with serving(engine, settings(per_request_metrics=True)) as url, http_client(url) as client:
        yield client


@pytest.mark.parametrize(
    "route, body",
    [
        (CHAT, {"messages": HI}),
        (TEXT, {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 9}),
    ],
)
def test_an_answer_tells_its_times_where_the_operator_wants_it(
    timed: httpx.Client, http: httpx.Client, route: str, body: dict[str, Any]
) -> None:
    metrics = timed.post(route, json=body).json()["metrics"]
    assert set(metrics) == set(TIMES)
    assert all(value >= 0 for value in metrics.values())
    assert metrics["generation_time_ms"] == pytest.approx(5 * metrics["mean_itl_ms"])
    assert "metrics" not in http.post(route, json=body).json()


def test_a_stream_tells_its_times_beside_its_usage(timed: httpx.Client) -> None:
    body = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, done = timed.post(CHAT, json=body).text.split("\n\n")[:-1]
    assert done == "data: [DONE]"
    assert set(json.loads(last.removeprefix("data: "))["metrics"]) == set(TIMES)
    assert not any("metrics" in chunk for chunk in chunks)


@pytest.mark.parametrize("fields", [{"prompt": ["a", "b"]}, {"prompt": "a", "n": 2, "temperature": 1}])
def test_several_choices_have_no_times(timed: httpx.Client, fields: dict[str, Any]) -> None:
    assert "metrics" not in timed.post(TEXT, json=fields).json()
