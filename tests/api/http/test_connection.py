"""What a connection may send, how long it may take, and when it is closed. Over sockets, with small limits."""

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from faser.api.http.limits import HttpLimits
from faser.cli.server import HttpServer
from faser.config.server import ServerConfig
from faser.types.engine import EngineState
from tests.api.raw_http import connect, error_of, head, read_all, request, send_endlessly, send_slowly
from tests.api.server import http_client, running, serving, settings
from tests.fake_engine import FakeEngine, saying
from tests.waiting import PATIENCE_S, until

CERTIFICATE = str(Path(__file__).parent / "localhost.pem")
KEY = "the-key"
BODY: dict[str, Any] = {"prompt": "hi", "max_tokens": 1000}
HEAD_BYTES = 4096
MAX_BODY_BYTES = 1 << 20
TIMEOUT_S = 0.4
# More than the server discards, plus what the system buffers on both sides.
ENDLESS = 64 << 20

LIMITS = ServerConfig(
    h11_max_incomplete_event_size=HEAD_BYTES,
    h11_max_header_count=20,
    timeout_request_headers=TIMEOUT_S,
    timeout_request_body=TIMEOUT_S,
    timeout_keep_alive=TIMEOUT_S,
    max_request_bytes=MAX_BODY_BYTES,
    disable_uvicorn_access_log=True,
)


@pytest.fixture(scope="module")
def limited_engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def limited_url(limited_engine: FakeEngine) -> Iterator[str]:
    """A server with small limits that asks for no key."""
    with serving(limited_engine, settings(max_request_bytes=MAX_BODY_BYTES), LIMITS) as url:
        yield url


@pytest.fixture
def engine(limited_engine: FakeEngine) -> FakeEngine:
    limited_engine.reset()
    return limited_engine


@pytest.fixture(scope="module")
def guarded_url() -> Iterator[str]:
    """The same with a key."""
    with serving(FakeEngine(), settings(api_keys=(KEY,), max_request_bytes=MAX_BODY_BYTES), LIMITS) as url:
        yield url


# Heads


@pytest.mark.parametrize(
    "begin, piece, status, words",
    [
        (b"GET /health HTTP/1.1\r\nX-Long: ", b"a" * 65536, 431, f"more than {HEAD_BYTES} bytes"),
        (b"GET /health?", b"a" * 65536, 414, f"at most {HEAD_BYTES} bytes"),
        (b"GET /health HTTP/1.1\r\n", b"X-A: " + b"a" * 500 + b"\r\n", 431, f"more than {HEAD_BYTES} bytes"),
        (b"GET /health HTTP/1.1\r\n", b"A: b\r\n", 431, "more than 20 headers"),
        (b"", b"\r\n" * 1000, 431, f"more than {HEAD_BYTES} bytes"),
        (
            head(Transfer_Encoding="chunked") + b"1\r\n{\r\n0\r\nX-Trailer: ",
            b"a" * 65536,
            431,
            f"more than {HEAD_BYTES} bytes",
        ),
        (head(Transfer_Encoding="chunked") + b"1;", b"a" * 65536, 431, f"more than {HEAD_BYTES} bytes"),
    ],
    ids=["line", "url", "headers", "count", "nothing", "trailer", "chunk-extension"],
)
def test_a_head_beyond_the_limits_is_refused_and_read_no_further(
    limited_url: str, begin: bytes, piece: bytes, status: int, words: str
) -> None:
    with connect(limited_url) as connection:
        connection.sendall(begin)
        assert send_endlessly(connection, piece, most=ENDLESS) < ENDLESS
        refused = error_of(read_all(connection))
        assert refused[0] == status
        assert words in refused[1]


def test_a_head_of_exactly_the_limit_is_answered(limited_url: str) -> None:
    begin, end = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: ", b"\r\nConnection: close\r\n\r\n"
    padding = b"a" * (HEAD_BYTES - len(begin) - len(end))
    with connect(limited_url) as connection:
        connection.sendall(begin + padding + end)
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "hosts, version, status",
    [
        ((), b"1.1", 400),
        ((b"a", b"a"), b"1.1", 400),
        ((b"localhost", b"evil.example"), b"1.1", 400),
        ((b"localhost", b"evil.example"), b"1.0", 400),
        ((b"a",), b"1.1", 200),
        ((b"",), b"1.1", 200),
        ((), b"1.0", 200),
    ],
)
def test_a_request_has_one_host(limited_url: str, hosts: tuple[bytes, ...], version: bytes, status: int) -> None:
    """RFC 9112, section 3.2. It holds for each request of a connection, and for spellings of the header's name."""
    whole = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
    names = (b"Host: ", b"hOSt:")
    asked = b"GET /health HTTP/%b\r\n" % version
    asked += b"".join(name + host + b"\r\n" for name, host in zip(names, hosts, strict=False))
    asked += b"Connection: close\r\n\r\n"
    with connect(limited_url) as connection:
        connection.sendall(whole)
        answer = b""
        while b"ready" not in answer:  # the first request is answered before the second one is sent
            answer += connection.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 200 ")
        connection.sendall(asked)
        answer = read_all(connection)
    if status == 200:
        assert answer.startswith(b"HTTP/1.1 200 ")
    else:
        assert error_of(answer) == (400, f"the request has {len(hosts)} Host headers; it must have one")


def test_a_second_host_among_the_trailers_is_no_host(limited_url: str) -> None:
    body = b'{"prompt": "x", "max_tokens": 1}'
    asked = head(Transfer_Encoding="chunked", Connection="close")
    asked += b"%x\r\n%b\r\n0\r\nHost: evil.example\r\n\r\n" % (len(body), body)
    with connect(limited_url) as connection:
        connection.sendall(asked)
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")


def test_what_is_not_http_is_refused_in_the_shape_of_every_error(limited_url: str) -> None:
    with connect(limited_url) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        status, message = error_of(read_all(connection))
    assert status == 400
    assert message.startswith("the request is not HTTP/1.1")


def test_more_requests_than_may_wait_on_a_connection_close_it(limited_url: str, engine: FakeEngine) -> None:
    engine.step_s = 60.0
    with connect(limited_url) as connection:
        connection.sendall(request(BODY))
        until(lambda: engine.num_open == 1)
        assert send_endlessly(connection, head("/health", method="GET") * 20, most=ENDLESS) < ENDLESS
    until(lambda: len(engine.aborted) == 1)


# Deadlines


@pytest.mark.parametrize("drip", [b"", b"A"], ids=["stalled", "dripping"])
def test_a_head_that_does_not_arrive_in_time_is_a_408(limited_url: str, drip: bytes) -> None:
    began_s = time.monotonic()
    with connect(limited_url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX-Half: ")
        send_slowly(connection, drip, every_s=0.05, for_s=2 * TIMEOUT_S)
        assert error_of(read_all(connection)) == (
            408,
            f"the request line and headers did not arrive within {TIMEOUT_S} s",
        )
    assert time.monotonic() - began_s > TIMEOUT_S


@pytest.mark.parametrize("drip", [b"", b" "], ids=["stalled", "dripping"])
def test_a_body_that_does_not_arrive_in_time_is_a_408(limited_url: str, engine: FakeEngine, drip: bytes) -> None:
    with connect(limited_url) as connection:
        connection.sendall(head(Content_Length=MAX_BODY_BYTES) + b"{" + b" " * 300_000)
        send_slowly(connection, drip, every_s=0.05, for_s=2 * TIMEOUT_S)
        assert error_of(read_all(connection)) == (408, f"the body did not arrive within {TIMEOUT_S} s")
    assert not engine.requests


@pytest.mark.parametrize(
    "begin, drip",
    [
        (b"", b""),
        (b"5\r\n", b""),
        (b"5\r\n{", b""),
        (b"", b"1\r\n \r\n"),
        (b"1;", b"a"),
        (b"1;" + b"a" * (HEAD_BYTES // 2), b""),
        (b"1\r\n \r\n0\r\n", b"X: y\r\n"),
        (b"0000", b"0"),
        (b"fffffff\r\n", b" "),
    ],
    ids=["no-chunk", "size", "half", "bytes", "extension", "long-extension", "trailers", "zeros", "large-chunk"],
)
@pytest.mark.full(but=("half", "extension", "zeros"))
def test_a_chunked_body_that_stalls_or_drips_is_a_408(
    limited_url: str, engine: FakeEngine, begin: bytes, drip: bytes
) -> None:
    with connect(limited_url) as connection:
        connection.sendall(head(Transfer_Encoding="chunked") + begin)
        send_slowly(connection, drip, every_s=0.05, for_s=2 * TIMEOUT_S)
        assert error_of(read_all(connection)) == (408, f"the body did not arrive within {TIMEOUT_S} s")
    assert not engine.requests


@pytest.mark.parametrize(
    "chunks",
    [
        b"fffffffffffffffff\r\n ",
        b"-1\r\n \r\n",
        b"0x1\r\n \r\n",
        b"1 \r\n{\r\n",
        b"\r\n",
        b"1\r\n{}\r\n0\r\n\r\n",
        b"1\n{\n0\n\n",
    ],
    ids=["beyond-64-bits", "negative", "prefix", "space", "none", "longer", "bare-newlines"],
)
def test_a_chunk_whose_size_is_wrong_is_a_400(limited_url: str, engine: FakeEngine, chunks: bytes) -> None:
    with connect(limited_url) as connection:
        connection.sendall(head(Transfer_Encoding="chunked") + chunks)
        assert error_of(read_all(connection))[0] == 400
    assert not engine.requests


@pytest.mark.parametrize(
    "fields",
    [
        b"Content-Length: 2\r\nContent-Length: 3",
        b"Content-Length: 2, 3",
        b"Content-Length: -2",
        b"Content-Length: 99999999999999999999",
        b"Content-Length: 2\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: gzip",
    ],
    ids=["twice", "list", "negative", "beyond-64-bits", "and-chunked", "other-coding"],
)
def test_a_body_whose_length_is_in_doubt_is_a_400(limited_url: str, engine: FakeEngine, fields: bytes) -> None:
    """Where a proxy reads another length, the rest of a body is the request of another client."""
    with connect(limited_url) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n" + fields + b"\r\n\r\n{}")
        assert error_of(read_all(connection))[0] == 400
    assert not engine.requests


def test_a_body_longer_than_it_says_is_followed_by_no_request(limited_url: str, engine: FakeEngine) -> None:
    body = b'{"prompt": "hi", "max_tokens": 1}'
    with connect(limited_url) as connection:
        connection.sendall(head(Content_Length=len(body)) + body + b"more than it says\r\n\r\n")
        answers = read_all(connection)
    assert answers.count(b"HTTP/1.1 ") <= 2
    assert len(engine.requests) <= 1


def test_half_heads_and_stalled_bodies_are_all_gone_after_the_deadline(limited_url: str) -> None:
    halves = [head()[:-2], head(Content_Length=MAX_BODY_BYTES) + b"{" + b" " * 30_000]
    connections = [connect(limited_url) for _ in range(200)]
    for number, connection in enumerate(connections):
        connection.sendall(halves[number % 2])
    for connection in connections:
        assert error_of(read_all(connection))[0] == 408
        connection.close()


def test_a_connection_that_sends_nothing_is_closed_without_an_answer(limited_url: str) -> None:
    with connect(limited_url) as connection:
        assert read_all(connection) == b""


def test_a_connection_without_a_request_is_closed_after_the_keep_alive_limit(limited_url: str) -> None:
    with connect(limited_url) as connection:
        connection.sendall(head("/health", method="GET"))
        began_s = time.monotonic()
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")
        assert time.monotonic() - began_s > TIMEOUT_S / 2


def test_no_limit_ends_a_request_that_is_being_answered(limited_url: str, engine: FakeEngine) -> None:
    """And the connection takes the next request after it."""
    engine.step_s = 2 * TIMEOUT_S
    with http_client(limited_url) as http:
        for _ in range(2):
            assert http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2}).status_code == 200


# Bodies that nobody reads


def test_a_request_without_a_key_is_refused_from_its_head_alone(guarded_url: str) -> None:
    with connect(guarded_url) as connection:
        connection.sendall(head(Content_Length=ENDLESS))
        assert error_of(read_all(connection))[0] == 401


def test_a_large_body_without_a_key_is_not_read(guarded_url: str) -> None:
    with connect(guarded_url) as connection:
        connection.sendall(head(Content_Length=2 * ENDLESS))
        assert send_endlessly(connection, b" " * 65536, most=ENDLESS) < ENDLESS
        assert error_of(read_all(connection))[0] == 401


def test_a_client_that_asks_before_it_sends_is_answered_not_to(guarded_url: str) -> None:
    with connect(guarded_url) as connection:
        connection.sendall(head(Content_Length=1000, Expect="100-continue"))
        answer = read_all(connection)
    assert b"100 Continue" not in answer
    assert error_of(answer)[0] == 401


def test_with_the_key_the_connection_stays_open(guarded_url: str) -> None:
    with connect(guarded_url) as connection:
        for _ in range(2):
            connection.sendall(request({"prompt": "hi"}, Authorization=f"Bearer {KEY}"))
            with HTTPResponse(connection) as answer:
                answer.begin()
                assert answer.status == 200
                assert answer.getheader("connection") is None
                assert b"Hello!" in answer.read()


def test_an_endless_chunked_body_is_closed_after_the_413(limited_url: str) -> None:
    with connect(limited_url) as connection:
        connection.sendall(head(Transfer_Encoding="chunked"))
        assert send_endlessly(connection, b"10000\r\n" + b" " * 65536 + b"\r\n", most=ENDLESS) < ENDLESS
        status, message = error_of(read_all(connection))
    assert status == 413
    assert f"at most {MAX_BODY_BYTES} are allowed" in message


def test_a_body_that_a_route_has_no_use_for_is_not_read_either(limited_url: str) -> None:
    with connect(limited_url) as connection:
        connection.sendall(head("/health", method="GET", Content_Length=2 * ENDLESS))
        assert send_endlessly(connection, b" " * 65536, most=ENDLESS) < ENDLESS
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")


# Clients that half-close, and clients that have gone


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seconds", [0.0, 1.0])
@pytest.mark.full(but=("0.0-False", "0.0-True", "1.0-True"))
def test_who_half_closes_after_the_request_gets_the_answer(
    limited_url: str, engine: FakeEngine, stream: bool, seconds: float
) -> None:
    """As `nc -N` does. An answer that takes long comes after interim ones, which every client must skip."""
    engine.script = saying("answer", tokens_per_step=6)
    engine.step_s = seconds
    with connect(limited_url) as connection:
        connection.sendall(request({**BODY, "stream": stream}))
        connection.shutdown(socket.SHUT_WR)
        with HTTPResponse(connection) as answer:
            answer.begin()
            assert answer.status == 200
            assert b"answer" in answer.read()
        assert read_all(connection) == b""
    assert not engine.aborted


def test_half_closing_is_possible_in_http_1_0(limited_url: str) -> None:
    with connect(limited_url) as connection:
        connection.sendall(b"GET /ready HTTP/1.0\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b'{"ready":true}')


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.full(but=("1.0-False", "1.1-True"))
def test_who_has_gone_is_not_taken_for_half_closed(
    limited_url: str, engine: FakeEngine, stream: bool, version: str
) -> None:
    """The engine would need a minute for the first token, so that no answer shows that nobody reads it."""
    engine.step_s = 60.0
    with connect(limited_url) as connection:
        connection.sendall(request({**BODY, "stream": stream}, version=version))
        until(lambda: engine.num_open == 1)
    until(lambda: len(engine.aborted) == 1)


def test_who_half_closes_first_and_goes_later_ends_the_request(limited_url: str, engine: FakeEngine) -> None:
    engine.step_s = 60.0
    with connect(limited_url) as connection:
        connection.sendall(request(BODY))
        connection.shutdown(socket.SHUT_WR)
        until(lambda: engine.num_open == 1)
        time.sleep(0.5)
        assert not engine.aborted
    until(lambda: len(engine.aborted) == 1)


@pytest.mark.parametrize("resets", [False, True])
def test_a_client_that_has_gone_ends_its_request_though_it_has_sent_another(
    limited_url: str, engine: FakeEngine, resets: bool
) -> None:
    engine.step_s = 60.0
    with connect(limited_url) as connection:
        connection.sendall(request(BODY) + request(BODY))
        until(lambda: engine.num_open == 1)
        if resets:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    until(lambda: len(engine.aborted) == 1)
    assert engine.num_open == 0


# Probes


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/metrics"])
@pytest.mark.parametrize("state", [EngineState.READY, EngineState.LOADING])
def test_a_probe_may_ask_for_the_head_alone(
    limited_url: str, engine: FakeEngine, path: str, state: EngineState
) -> None:
    engine.state = state
    with http_client(limited_url) as http:
        whole, alone = http.get(path), http.head(path)
    assert alone.status_code == whole.status_code
    assert alone.content == b""
    assert alone.headers["content-length"] == whole.headers["content-length"]


# Too many connections


@pytest.fixture
def crowded() -> Iterator[tuple[str, FakeEngine]]:
    """A server for eight connections, on six of which requests are answered at a time."""
    engine = FakeEngine()
    with serving(engine, config=ServerConfig(limit_concurrency=8, disable_uvicorn_access_log=True)) as url:
        yield url, engine


def test_requests_leave_connections_for_probes(crowded: tuple[str, FakeEngine]) -> None:
    url, engine = crowded
    engine.step_s = 60.0
    clients = [connect(url) for _ in range(6)]
    for client in clients:
        client.sendall(request(BODY))
    until(lambda: engine.num_open == 6)
    with connect(url) as connection:
        connection.sendall(request(BODY))
        answer = read_all(connection)
        assert error_of(answer) == (503, "all connections for requests are in use")
        assert b"\r\nretry-after: 1\r\n" in answer.lower()
    for path in ("/health", "/ready", "/ping", "/metrics"):
        with http_client(url) as http:
            assert http.get(path).status_code == 200
    assert engine.num_open == 6
    for client in clients:
        client.close()
    until(lambda: engine.num_open == 0)


@pytest.mark.parametrize(
    "held",
    [b"GET /health HTTP/1.1\r\n", head(Content_Length=1000) + b"{", head("/health", method="GET")],
    ids=["half-head", "stalled-body", "idle"],
)
def test_waiting_connections_make_room_for_new_ones(crowded: tuple[str, FakeEngine], held: bytes) -> None:
    """The oldest ones go. A body that is given up is answered."""
    url, _ = crowded
    waiting = [connect(url) for _ in range(8)]
    for each in waiting:
        each.sendall(held)
    time.sleep(0.2)
    with http_client(url) as http:
        for _ in range(3):
            assert http.get("/health", headers={"Connection": "close"}).status_code == 200
    last = read_all(waiting[0])
    if held.startswith(b"POST"):
        assert error_of(last)[0] == 503
    for each in waiting:
        each.close()


def test_bodies_together_hold_no_more_than_their_limit() -> None:
    """max_request_bytes of 64 KiB: eight such bodies may be under way, and the oldest makes room for a ninth."""
    config = ServerConfig(max_request_bytes=1 << 16, disable_uvicorn_access_log=True)
    with serving(FakeEngine(), settings(max_request_bytes=1 << 16), config) as url:
        uploads = []
        for _ in range(9):
            uploads.append(connect(url))
            uploads[-1].sendall(head(Content_Length=1 << 16) + b" " * 60_000)
            time.sleep(0.05)
        assert error_of(read_all(uploads[0]))[0] == 503
        rest = b" " * ((1 << 16) - 60_000 - len(b'{"prompt": "hi"}')) + b'{"prompt": "hi"}'
        uploads[1].sendall(rest)
        assert uploads[1].recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        for each in uploads:
            each.close()


def test_a_client_that_does_not_take_its_answer_is_given_up() -> None:
    left = threading.Event()

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200})
        for _ in range(1000):
            await send({"type": "http.response.body", "body": b" " * 65536, "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    limits = HttpLimits(
        max_head_bytes=HEAD_BYTES,
        max_headers=20,
        max_bodies_bytes=MAX_BODY_BYTES,
        max_connections=None,
        head_timeout_s=TIMEOUT_S,
        body_timeout_s=TIMEOUT_S,
        keep_alive_s=TIMEOUT_S,
        send_timeout_s=TIMEOUT_S,
    )
    config = uvicorn.Config(application, lifespan="off", log_config=None, access_log=False)
    with running(HttpServer(config, limits)) as url, connect(url) as connection:
        connection.sendall(head("/", method="GET"))
        assert left.wait(PATIENCE_S)


# TLS


@pytest.fixture(scope="module")
def tls_url() -> Iterator[str]:
    config = ServerConfig(
        ssl_keyfile=CERTIFICATE,
        ssl_certfile=CERTIFICATE,
        limit_concurrency=8,
        timeout_request_headers=5.0,
        disable_uvicorn_access_log=True,
    )
    with serving(FakeEngine(), config=config) as url:
        yield url


@pytest.fixture(scope="module")
def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=CERTIFICATE)


def test_tls_is_served_with_the_same_limits(tls_url: str, trusting: ssl.SSLContext) -> None:
    with httpx.Client(base_url=tls_url, verify=trusting) as http:
        assert http.post("/v1/completions", json={"prompt": "hi"}).status_code == 200
        assert http.get("/health", headers={"X-Long": "a" * 70_000}).status_code == 431


def test_handshakes_that_do_not_go_on_make_room_and_end(tls_url: str, trusting: ssl.SSLContext) -> None:
    began_s = time.monotonic()
    silent = [connect(tls_url) for _ in range(30)]
    with httpx.Client(base_url=tls_url, verify=trusting, timeout=4) as http:
        assert http.get("/health").status_code == 200
    for each in silent:
        assert read_all(each) == b""
        each.close()
    assert time.monotonic() - began_s < PATIENCE_S
