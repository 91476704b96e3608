"""What a client that behaves must never see is found in answers that a server might send."""

import json

import pytest

from benchmarks.serving.chaos_clients import ERROR, TOKENS, Violation, honest_error, stream_end


def error(code: int, message: str) -> dict[str, object]:
    return {"error": {"message": message, "type": "SomeError", "param": None, "code": code}}


def chunk(finish_reason: str | None) -> str:
    return "data: " + json.dumps({"choices": [{"finish_reason": finish_reason}]})


DONE = "data: [DONE]"
DIED = error(503, "request 7: the engine died (signal 9)")


@pytest.mark.parametrize(
    "status, content", [(503, error(503, "the engine is restarting")), (503, DIED), (429, error(429, "slower"))]
)
def test_an_error_of_load_or_of_an_engine_that_ended_is_well_formed(status: int, content: object) -> None:
    assert honest_error(status, json.dumps(content).encode()) == ERROR


@pytest.mark.parametrize(
    "status, content",
    [
        (500, error(500, "request 7 failed because of an internal error")),
        (500, error(500, "request 7: the engine died (signal 9)")),
        (400, error(400, "max_tokens is 3")),
        (503, error(500, "the code is another one")),
        (503, {"error": {"code": 503, "type": "SomeError", "message": ""}}),
        (503, {"detail": "overloaded"}),
        (503, []),
    ],
)
def test_any_other_error_is_a_violation(status: int, content: object) -> None:
    with pytest.raises(Violation):
        honest_error(status, json.dumps(content).encode())


def test_a_stream_ends_in_tokens_or_in_an_error_event() -> None:
    assert stream_end([chunk(None), chunk("stop"), DONE]) == TOKENS
    assert stream_end([chunk(None), "data: " + json.dumps(DIED), DONE]) == ERROR


@pytest.mark.parametrize("events", [[], [chunk("stop")], [chunk(None), DONE], [DONE]])
def test_a_stream_that_just_stops_is_a_violation(events: list[str]) -> None:
    with pytest.raises(Violation):
        stream_end(events)
