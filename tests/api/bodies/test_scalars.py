"""Numbers and truth values are read as vLLM reads them where nothing is lost, and not otherwise."""

from typing import Any

import httpx
import pytest

from tests.fake_engine import FakeEngine


@pytest.mark.parametrize(
    "field, given, read",
    [
        ("n", "2", 2),
        ("n", 2.0, 2),
        ("n", "2.0", 2),
        ("temperature", "0.5", 0.5),
        ("temperature", 1, 1.0),
        ("top_k", "-1", 0),
        ("ignore_eos", 1, True),
        ("ignore_eos", "true", True),
        ("ignore_eos", 0, False),
        ("seed", "7", 7),
    ],
)
def test_a_value_in_another_spelling_is_the_same_value(
    http: httpx.Client, engine: FakeEngine, field: str, given: Any, read: Any
) -> None:
    assert http.post("/v1/completions", json={"prompt": "hi", field: given}).status_code == 200
    found = getattr(engine.requests[0].sampling, field)
    assert (found, type(found)) == (read, type(read))


def test_a_stream_may_be_asked_for_with_a_one(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "hi", "stream": 1})
    assert answer.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("given", [1.5, "1.5", "x", "", "0x10", "1_000", " 1", "٣", True, "9" * 5000, [1], {}])
def test_what_would_have_to_be_guessed_is_refused(http: httpx.Client, given: Any) -> None:
    answer = http.post("/v1/completions", json={"prompt": "hi", "max_tokens": given})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
