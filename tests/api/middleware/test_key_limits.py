"""Limits of keys, each with a clock of its own or over HTTP: what one key uses, another still has.

The bucket by hand-computed levels.
"""

import threading

import httpx
import pytest

from faser.api.bodies.errors import HttpError
from faser.api.middleware.key_limits import KeyLimits, KeyUsage, TokenBucket
from tests.api.server import http_client, serving, settings
from tests.fake_engine import FakeEngine, saying
from tests.waiting import PATIENCE_S, until

TEXT = "/v1/completions"
KEYS = ("k0", "k1")


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def refused(usage: KeyUsage) -> HttpError:
    refusal = usage.refusal()
    assert refusal is not None
    assert refusal.status == 429
    return refusal


def ask(http: httpx.Client, key: str, **body: object) -> httpx.Response:
    return http.post(TEXT, json={"prompt": "four", **body}, headers={"Authorization": f"Bearer {key}"})


def test_requests_at_once_are_limited_and_free_again_when_one_ends() -> None:
    clock = Clock()
    usage = KeyUsage(KeyLimits(parallel_requests=2), clock)
    began = [usage.begin(), usage.begin()]
    assert "has 2 unfinished requests; at most 2 are allowed at once" in refused(usage).message
    clock.now_s += 100
    usage.end(began[0])
    assert usage.refusal() is None


def test_retry_after_of_parallel_requests_follows_how_long_they_take() -> None:
    clock = Clock()
    usage = KeyUsage(KeyLimits(parallel_requests=2), clock)
    for _ in range(50):
        began_s = usage.begin()
        clock.now_s += 60
        usage.end(began_s)
    usage.begin(), usage.begin()
    assert refused(usage).headers["Retry-After"] == "30"


def test_requests_per_minute_say_when_the_next_one_may_come() -> None:
    clock = Clock()
    usage = KeyUsage(KeyLimits(requests_per_minute=4), clock)
    for _ in range(4):
        assert usage.refusal() is None
        usage.end(usage.begin())
    refusal = refused(usage)
    assert refusal.message == "this API key has used its 4 requests per minute; try again in 15 s"
    assert refusal.headers["Retry-After"] == "15"
    clock.now_s += 15
    assert usage.refusal() is None


def test_tokens_per_minute_are_paid_after_they_are_used() -> None:
    clock = Clock()
    usage = KeyUsage(KeyLimits(tokens_per_minute=600), clock)
    usage.use_tokens(1199)
    assert refused(usage).headers["Retry-After"] == "60"
    clock.now_s += 60
    assert usage.refusal() is None


def test_a_refused_request_takes_nothing() -> None:
    """A client that keeps asking is let in as soon as one that waits."""
    clock = Clock()
    usage = KeyUsage(KeyLimits(requests_per_minute=1), clock)
    usage.end(usage.begin())
    for _ in range(59):
        refused(usage)
        clock.now_s += 1
    clock.now_s += 1
    assert usage.refusal() is None


def test_one_key_has_its_limit_and_another_its_own() -> None:
    limited = settings(api_keys=KEYS, key_limits=KeyLimits(requests_per_minute=2))
    with serving(FakeEngine(), limited) as url, http_client(url) as http:
        assert [ask(http, "k0").status_code for _ in range(3)] == [200, 200, 429]
        assert ask(http, "k1").status_code == 200
        answer = ask(http, "k0")
        assert answer.json()["error"]["type"] == "RateLimitError"
        assert 1 <= int(answer.headers["retry-after"]) <= 30
        assert "x-request-id" in answer.headers
        assert http.get("/health").status_code == 200
        assert 'admission_rejections_total{engine="0",model_name="tiny",reason="key_limit"} 2.0' in metrics(http)


def test_the_body_of_a_refused_request_is_not_read() -> None:
    """Its body is not JSON, and nobody complains."""
    limited = settings(api_keys=KEYS, key_limits=KeyLimits(requests_per_minute=1))
    with serving(FakeEngine(), limited) as url, http_client(url) as http:
        assert ask(http, "k0").status_code == 200
        headers = {"Authorization": "Bearer k0", "Content-Type": "application/json"}
        assert http.post(TEXT, content=b"{", headers=headers).status_code == 429


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_and_answers_count_as_tokens(stream: bool) -> None:
    """The fake's tokens are bytes: 4 of the prompt, and 6 of the answer for each of the 2 samples."""
    limited = settings(api_keys=KEYS, key_limits=KeyLimits(tokens_per_minute=60))
    with serving(FakeEngine(saying("Hello!")), limited) as url, http_client(url) as http:
        for _ in range(3):
            assert ask(http, "k0", n=2, stream=stream).status_code == 200
        assert ask(http, "k0", n=2, stream=stream).status_code == 200  # 48 of 60 are used; this is paid later
        refusal = ask(http, "k0")
        assert refusal.status_code == 429
        assert refusal.json()["error"]["message"].startswith("this API key has used its 60 tokens per minute")
        assert 4 <= int(refusal.headers["retry-after"]) <= 5


def test_unfinished_streams_count_until_their_end() -> None:
    engine = FakeEngine(saying("a long answer"))
    engine.step_s = 0.05
    limited = settings(api_keys=KEYS, key_limits=KeyLimits(parallel_requests=1))
    with serving(engine, limited) as url, http_client(url) as http:
        done: list[int] = []
        thread = threading.Thread(target=lambda: done.append(ask(http, "k0", stream=True).status_code))
        thread.start()
        until(lambda: engine.num_open == 1)
        with http_client(url) as other:
            assert ask(other, "k0").status_code == 429
            assert ask(other, "k1").status_code == 200
        thread.join(PATIENCE_S)
        assert done == [200]
        until(lambda: engine.num_open == 0)
        assert ask(http, "k0").status_code == 200


def test_a_client_that_disconnects_gives_its_place_back() -> None:
    engine = FakeEngine(saying("a long answer" * 100))
    engine.step_s = 0.05
    limited = settings(api_keys=KEYS, key_limits=KeyLimits(parallel_requests=1))
    with serving(engine, limited) as url:
        with http_client(url) as http:
            headers = {"Authorization": "Bearer k0"}
            with http.stream("POST", TEXT, json={"prompt": "x", "stream": True}, headers=headers) as answer:
                assert answer.status_code == 200
        until(lambda: engine.num_open == 0)
        engine.script = saying("short")
        with http_client(url) as http:
            until(lambda: ask(http, "k0").status_code == 200)


def metrics(http: httpx.Client) -> str:
    return http.get("/metrics").text


def test_a_minutes_worth_may_be_taken_at_once_and_no_more() -> None:
    bucket = TokenBucket(3, now_s=100.0)
    for _ in range(3):
        assert bucket.wait_s(100.0) == 0.0
        bucket.take(1, 100.0)
    assert bucket.wait_s(100.0) == 20.0
    assert bucket.wait_s(115.0) == 5.0
    assert bucket.wait_s(120.0) == 0.0


def test_it_never_holds_more_than_a_minutes_worth() -> None:
    bucket = TokenBucket(60, now_s=0.0)
    bucket.take(60, 10_000.0)
    assert bucket.wait_s(10_000.0) == 1.0


def test_a_debt_is_paid_at_the_rate() -> None:
    bucket = TokenBucket(600, now_s=0.0)
    bucket.take(1600, 0.0)  # 1000 more than there were
    assert bucket.wait_s(0.0) == 100.1
    assert bucket.wait_s(100.1) < 1e-9
