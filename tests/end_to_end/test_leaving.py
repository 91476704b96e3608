"""Clients that go away: what they left running ends, and the KV cache is empty again. Seen through /metrics."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from tests.end_to_end.conftest import KEY, MODEL
from tests.end_to_end.server import Server
from tests.waiting import until

PROMPT = "the quick brown fox"
MOST_TOKENS = 2000  # of an answer: one that is not aborted takes seconds


@contextmanager
def asking(server: Server, **fields: Any) -> Iterator[socket.socket]:
    """A connection on which a long text completion has been asked for; nothing of the answer is read."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": MOST_TOKENS, "ignore_eos": True, **fields}
    content = json.dumps(body).encode()
    address = urlsplit(server.url)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(head.encode() + content)
        yield connection


def aborted(server: Server) -> float:
    return server.metric("request_success_total", finished_reason="abort")


@pytest.fixture(autouse=True)
def _idle_before_and_after(server: Server, small: Server) -> Iterator[None]:
    for each in (server, small):
        until(each.is_idle)
    yield
    for each in (server, small):
        until(each.is_idle)


def test_a_closed_stream_frees_everything_at_once(small: Server) -> None:
    before, generated = aborted(small), small.metric("generation_tokens_total")
    with small.client() as client:
        stream = client.completions.create(
            model=MODEL, prompt=PROMPT, n=4, max_tokens=MOST_TOKENS, stream=True, extra_body={"ignore_eos": True}
        )
        for _ in zip(range(5), stream, strict=False):
            pass
        until(lambda: small.metric("num_requests_running") == 4)
        assert small.metric("kv_cache_usage_perc") > 0
        stream.close()
        until(small.is_idle)
    assert aborted(small) == before + 1
    assert small.metric("generation_tokens_total") - generated < 4 * MOST_TOKENS


@pytest.mark.parametrize("stream", [True, False])
def test_a_closed_connection_frees_everything_at_once(small: Server, stream: bool) -> None:
    before = aborted(small)
    with asking(small, n=4, stream=stream):
        until(lambda: small.metric("num_requests_running") == 4)
    until(small.is_idle)
    assert aborted(small) == before + 1


def test_who_leaves_while_waiting_is_never_run(small: Server) -> None:
    """Four samples fill the server; a waiting request has computed nothing when its client leaves."""
    before = small.metric("prompt_tokens_total")
    with asking(small, n=4):
        until(lambda: small.metric("num_requests_running") == 4)
        running = small.metric("prompt_tokens_total")
        with asking(small, n=2, prompt="someone else"):
            until(lambda: small.metric("num_requests_waiting") == 2)
        until(lambda: small.metric("num_requests_waiting") == 0)
        assert small.metric("num_requests_running") == 4
        assert small.metric("prompt_tokens_total") == running > before


def test_who_leaves_before_the_body_is_there_leaves_nothing(server: Server) -> None:
    address = urlsplit(server.url)
    for content in (b"", b'{"prompt": "the qui'):
        with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: 1000\r\n\r\n" + content
            )
    until(server.is_idle)
    with server.client() as client:
        assert client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1).choices


def test_fifty_clients_killed_under_load_leave_nothing_behind(server: Server, client: openai.OpenAI) -> None:
    """Half of them stream, all at other moments; those who stay get their answers."""
    before = aborted(server)
    stayed: list[int] = []

    def stay() -> None:
        usage = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=60, extra_body={"ignore_eos": True}
        ).usage
        assert usage is not None
        stayed.append(usage.completion_tokens)

    def leave(number: int) -> None:
        with asking(server, stream=bool(number % 2), n=1 + number % 3) as connection:
            if number % 5:
                time.sleep(0.02 * number)
            else:
                until(lambda: server.metric("num_requests_running") > 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # closing resets

    threads = [threading.Thread(target=leave, args=(number,)) for number in range(50)]
    threads += [threading.Thread(target=stay) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(server.is_idle)
    assert stayed == [60] * 5
    assert before < aborted(server) <= before + 50


def test_a_reader_that_does_not_read_holds_up_nobody(server: Server, client: openai.OpenAI) -> None:
    before = aborted(server)
    with asking(server, n=16, stream=True):
        until(lambda: server.metric("num_requests_running") >= 16)
        answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5)
        assert answer.usage is not None
    until(server.is_idle)
    assert aborted(server) == before + 1
