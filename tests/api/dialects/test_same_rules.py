"""A chat has the same rules in every dialect: keys, limits, deadlines, caches, speculation."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from faser.api.middleware.key_limits import KeyLimits
from tests.api.server import http_client, serving, settings
from tests.fake_engine import FakeEngine, saying

HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 600},
}
KEY = {"Authorization": "Bearer one"}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(saying("Hello!"))


@pytest.fixture
def http(engine: FakeEngine) -> Iterator[httpx.Client]:
    chosen = settings(api_keys=("one", "two"), max_request_bytes=2000)
    with serving(engine, chosen) as url, http_client(url) as client:
        yield client


def test_a_key_has_one_cache_and_one_share_in_every_dialect(http: httpx.Client, engine: FakeEngine) -> None:
    for key in ("one", "two"):
        for path, body in BODIES.items():
            assert http.post(path, json=body, headers={"Authorization": f"Bearer {key}"}).status_code == 200
    namespaces = [request.cache_salt for request in engine.requests]
    tenants = [request.tenant for request in engine.requests]
    assert namespaces == [namespaces[0]] * 3 + [namespaces[3]] * 3
    assert namespaces[0] != namespaces[3]
    assert tenants == ["key 0"] * 3 + ["key 1"] * 3
    assert not any(request.shares_cache for request in engine.requests)
    assert len({request.prompt_token_ids for request in engine.requests}) == 1


@pytest.mark.parametrize("path", BODIES)
def test_salt_deadline_priority_and_speculation_reach_the_engine(
    http: httpx.Client, engine: FakeEngine, path: str
) -> None:
    http.post(path, json={**BODIES[path], "cache_salt": "mine", "timeout": 7.0, "priority": 3}, headers=KEY)
    http.post(path, json=BODIES[path], headers={**KEY, "X-Request-Timeout": "9", "X-Faser-Speculative": "off"})
    salted, timed = engine.requests
    assert salted.cache_salt != timed.cache_salt
    assert (salted.priority, timed.priority) == (3, 0)
    assert salted.deadline_s == pytest.approx(salted.arrival_s + 7)
    assert timed.deadline_s == pytest.approx(timed.arrival_s + 9)
    assert (salted.speculation.enabled, timed.speculation.enabled) == (True, False)


@pytest.mark.parametrize("path", [*BODIES, "/v1/messages/count_tokens"])
def test_keys_and_the_size_of_a_body_are_checked_first(http: httpx.Client, path: str) -> None:
    assert http.post(path, content=b"{").status_code == 401
    large = {**BODIES.get(path, {"messages": HI}), "user": "x" * 2000}
    assert http.post(path, json=large, headers=KEY).status_code == 413


@pytest.mark.parametrize("path", BODIES)
def test_tokens_count_for_the_key(engine: FakeEngine, path: str) -> None:
    chosen = settings(api_keys=("one",), key_limits=KeyLimits(tokens_per_minute=20))
    with serving(engine, chosen) as url, http_client(url) as http:
        assert http.post(path, json=BODIES[path], headers=KEY).status_code == 200
        answer = http.post(path, json=BODIES[path], headers=KEY)
    assert answer.status_code == 429
    assert "tokens per minute" in answer.text


@pytest.mark.parametrize("path", BODIES)
def test_unknown_fields_are_refused_where_the_operator_says_so(engine: FakeEngine, path: str) -> None:
    with serving(engine, settings(strict=True)) as url, http_client(url) as http:
        assert http.post(path, json=BODIES[path]).status_code == 200
        assert "colour is not a known field" in http.post(path, json={**BODIES[path], "colour": 1}).text


@pytest.mark.parametrize("path", BODIES)
def test_a_client_that_leaves_aborts_its_request(engine: FakeEngine, path: str) -> None:
    engine.step_s = 0.05
    engine.script = saying("x" * 500)
    with serving(engine) as url, http_client(url) as http:
        with http.stream("POST", path, json={**BODIES[path], "stream": True}) as answer:
            next(answer.iter_raw())
        deadline = 100
        while not engine.aborted and deadline:
            deadline -= 1
            http.get("/health")
    assert len(engine.aborted) == 1


@pytest.mark.parametrize("has_one_user", [True, False])
@pytest.mark.parametrize("streams", [True, False])
def test_without_keys_cached_tokens_are_shown_where_there_is_one_user(has_one_user: bool, streams: bool) -> None:
    engine, found = FakeEngine(saying("Hello!", cached=4)), {}
    with (
        serving(engine, settings(has_one_user=has_one_user, force_include_usage=True)) as url,
        http_client(url) as http,
    ):
        for path, body in BODIES.items():
            answer = http.post(path, json={**body, "stream": streams})
            assert answer.status_code == 200
            found[path] = re.findall(r'"(?:cached_tokens|cache_read_input_tokens)": ?(\d+)', answer.text)[-1:]
    shown = ["4"] if has_one_user else ["0"]
    assert found == {
        "/v1/chat/completions": ["4"] if has_one_user else [],
        "/v1/responses": shown,
        "/v1/messages": shown,
    }
    assert all(request.shares_cache for request in engine.requests)
