"""All requests of one body run, or none: the engine knows of all of them when the first is submitted."""

import httpx

from faser.errors import OverloadError
from tests.fake_engine import FakeEngine


def test_the_first_request_of_a_body_says_how_many_samples_follow(http: httpx.Client, engine: FakeEngine) -> None:
    assert http.post("/v1/completions", json={"prompt": ["a", "b", "c"], "n": 2}).status_code == 200
    assert engine.following == [4, 2, 0]


def test_a_body_for_which_there_is_no_room_starts_nothing(http: httpx.Client, engine: FakeEngine) -> None:
    engine.refusals = [OverloadError("the queue is full", retry_after_s=22)]
    answer = http.post("/v1/completions", json={"prompt": ["a", "b", "c"]})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "22")
    assert engine.following == [2]
    assert engine.requests == []
