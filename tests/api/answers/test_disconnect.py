"""A client that goes away takes its request with it, streaming or not."""

import json
import socket
from typing import Any

import httpx
import pytest

from tests.api.server import http_client, until
from tests.fake_engine import FakeEngine, saying

BODY: dict[str, Any] = {"prompt": ["one", "two"], "max_tokens": 1000}


def send_raw(url: str, body: dict[str, Any]) -> socket.socket:
    """A request on a bare socket, so that the test decides when it is closed."""
    address = httpx.URL(url)
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    connection = socket.create_connection((address.host, address.port or 80))
    connection.sendall(head.encode() + content)
    return connection


def slow(engine: FakeEngine, step_s: float) -> None:
    engine.script = saying("x" * 1000)
    engine.step_s = step_s


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("step_s", [0.005, 60.0])
def test_client_that_leaves_aborts_its_request(url: str, engine: FakeEngine, stream: bool, step_s: float) -> None:
    """step_s of a minute: it leaves while it waits for the first token."""
    slow(engine, step_s)
    connection = send_raw(url, {**BODY, "stream": stream})
    until(lambda: engine.num_open == 2)
    if stream and step_s < 1:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    assert not engine.aborted
    connection.close()
    until(lambda: len(engine.aborted) == 2, timeout_s=2)
    assert sorted(engine.aborted) == sorted(request.request_id for request in engine.requests)
    assert engine.num_open == 0


def test_client_that_stops_reading_its_stream_aborts_it(url: str, engine: FakeEngine) -> None:
    slow(engine, 0.005)
    with http_client(url) as http, http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
        next(answer.iter_lines())
    until(lambda: len(engine.aborted) == 2, timeout_s=2)


def test_client_that_leaves_while_sending_its_body_leaves_nothing_behind(url: str, engine: FakeEngine) -> None:
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port or 80)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 1000\r\n\r\n{"
        )
    with http_client(url) as http:
        assert http.get("/health").status_code == 200
    assert not engine.requests


def test_request_that_finishes_aborts_nothing(http: httpx.Client, engine: FakeEngine) -> None:
    http.post("/v1/completions", json={**BODY, "stream": True})
    http.post("/v1/completions", json=BODY)
    assert len(engine.requests) == 4
    assert not engine.aborted
    assert engine.num_open == 0
