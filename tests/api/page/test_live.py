"""GET /live over HTTP: events, keys, limits, and an end that no viewer delays."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from faser.api.middleware.key_limits import KeyLimits
from faser.types import EngineState
from tests.api.server import http_client, serving, settings, until
from tests.fake_engine import FakeEngine, saying

KEY = {"Authorization": "Bearer k0"}


@contextmanager
def watching(http: httpx.Client, headers: dict[str, str] | None = None) -> Iterator[Iterator[dict[str, Any]]]:
    """The messages of one viewer."""
    with http.stream("GET", "/live", headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-cache"
        yield (json.loads(line[6:]) for line in answer.iter_lines() if line)


def test_a_viewer_gets_the_history_and_then_a_sample_each_second(http: httpx.Client) -> None:
    began_s = time.monotonic()
    with watching(http) as messages:
        first = next(messages)
        assert time.monotonic() - began_s < 0.5
        assert first["server"]["model"] == "tiny"
        assert first["server"]["version"] == "1.2.3"
        assert isinstance(first["history"], list)
        samples = [next(messages)["sample"] for _ in range(2)]
    assert 1.5 < time.monotonic() - began_s < 4
    assert samples[1]["t"] - samples[0]["t"] == pytest.approx(samples[1]["dt"], abs=0.01)


def test_it_needs_the_key_and_counts_for_no_limit_of_it() -> None:
    limits = KeyLimits(parallel_requests=1, requests_per_minute=2)
    engine = FakeEngine(saying("Hello!"))
    with serving(engine, settings(api_keys=("k0",), key_limits=limits)) as url, http_client(url) as http:
        assert http.get("/live").status_code == 401
        with watching(http, KEY) as one, watching(http, KEY) as other:
            next(one), next(other)
            asked = {"prompt": "four", "max_tokens": 2}
            answers = [http.post("/v1/completions", json=asked, headers=KEY).status_code for _ in range(3)]
    assert answers == [200, 200, 429]


def test_viewers_beyond_the_limit_are_refused_and_one_that_leaves_makes_room() -> None:
    with serving(FakeEngine(), settings(most_viewers=1)) as url, http_client(url) as http:
        with watching(http) as messages:
            next(messages)
            refused = http.get("/live")
            assert refused.status_code == 503
            assert "has 1 viewers; at most 1" in refused.json()["error"]["message"]
            assert int(refused.headers["retry-after"]) > 0

        def has_room() -> bool:
            with http.stream("GET", "/live") as answer:
                return answer.status_code == 200

        until(has_room)


def test_without_the_page_there_is_no_feed() -> None:
    with serving(FakeEngine(), settings(page=False)) as url, http_client(url) as http:
        assert http.get("/live").status_code == 404


def test_it_is_sent_while_the_model_is_loaded_and_ends_with_the_server() -> None:
    engine = FakeEngine()
    engine.loaded, engine.state = False, EngineState.LOADING
    with serving(engine) as url, http_client(url) as http, watching(http) as messages:
        assert next(messages)["server"]["engine"] is None
        engine.state = EngineState.DRAINING
        began_s = time.monotonic()
        assert [next(iter(each)) for each in messages][-1] == "end"
        assert time.monotonic() - began_s < 1.5
        assert http.get("/live").status_code == 503
