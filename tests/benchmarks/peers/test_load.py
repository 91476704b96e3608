"""The closed loop against a fake server that speaks HTTP over a real socket."""

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from benchmarks.peers.load import Exchange, LoadError, Target, run_load
from tests.waiting import PATIENCE_S

PROMPTS = [f"{index} words" for index in range(7)]


@dataclass
class FakeServer:
    """Answers each chat request with `output_tokens` chunks of text, and a usage that counts them.

    cut: bytes a write carries, so that events are torn apart. most_at_once: the greatest number of requests
    that were under way together. gather: the first answers wait until that many requests are there.
    closing: ends every pause.
    """

    output_tokens: int = 4
    status: int = 200
    error: str | None = None
    cut: int = 7
    pause_s: float = 0.002
    gather: int = 1
    bodies: list[dict[str, Any]] = field(default_factory=list)
    most_at_once: int = 0
    closing: threading.Event = field(default_factory=threading.Event)
    _at_once: int = 0
    _gathered: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def counted(self, body: dict[str, Any]) -> Iterator[None]:
        with self._lock:
            self.bodies.append(body)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        if self.most_at_once >= self.gather:
            self._gathered.set()
        self._gathered.wait(PATIENCE_S)
        yield
        with self._lock:
            self._at_once -= 1

    def events(self, prompt_tokens: int) -> Iterator[bytes]:
        yield _event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for index in range(self.output_tokens):
            yield _event({"choices": [{"delta": {"content": f"é{index}"}}]})
        if self.error is not None:
            yield _event({"error": {"message": self.error}})
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": self.output_tokens}
        yield _event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


def _handler(fake: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with contextlib.suppress(ConnectionError):
                self._answer(body)

        def _answer(self, body: dict[str, Any]) -> None:
            self.send_response(fake.status)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            with fake.counted(body):
                for event in fake.events(int(body["messages"][0]["content"].split()[0])):
                    fake.closing.wait(fake.pause_s)
                    for start in range(0, len(event), fake.cut):
                        self._write_chunk(event[start : start + fake.cut])
            self._write_chunk(b"")

        def _write_chunk(self, piece: bytes) -> None:
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    return Handler


class _WaitingServer(ThreadingHTTPServer):
    daemon_threads = False  # closing waits for every answer to end


@contextlib.contextmanager
def _listening(fake: FakeServer) -> Iterator[Target]:
    """The fake in threads of its own, as the target of a load."""
    with _WaitingServer(("127.0.0.1", 0), _handler(fake)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield Target(name="fake", base_url=url, model="m", extra_body={"ignore_eos": True})
        finally:
            fake.closing.set()
            server.shutdown()
            thread.join()


def _load(
    target: Target, *, concurrency: int = 1, output_tokens: int = 4, timeout_s: float = PATIENCE_S
) -> list[Exchange]:
    return run_load(target, PROMPTS, concurrency=concurrency, output_tokens=output_tokens, timeout_s=timeout_s)


@pytest.mark.parametrize("concurrency", [1, 3, 16])
def test_as_many_requests_are_under_way_as_was_asked_and_answers_keep_the_order_of_the_prompts(
    concurrency: int,
) -> None:
    expected = min(concurrency, len(PROMPTS))
    with _listening(fake := FakeServer(gather=expected)) as target:
        exchanges = _load(target, concurrency=concurrency)

    assert fake.most_at_once == expected
    assert [exchange.prompt_tokens for exchange in exchanges] == list(range(7))


def test_every_piece_of_text_has_a_time_after_the_request_and_torn_events_count_once() -> None:
    with _listening(FakeServer(cut=3, pause_s=0.01)) as target:
        exchanges = _load(target)

    for exchange in exchanges:
        assert len(exchange.token_times_s) == exchange.output_tokens == 4
        assert exchange.ttft_s >= 0.02  # the empty first delta is not a token
        assert len(exchange.gaps_s) == 3
        assert exchange.tpot_s == pytest.approx(sum(exchange.gaps_s) / 3)
        assert exchange.token_times_s[-1] >= exchange.sent_s + 0.05


def test_requests_are_greedy_streamed_and_carry_the_targets_own_fields() -> None:
    with _listening(fake := FakeServer()) as target:
        _load(target)

    assert fake.bodies[0] == {
        "model": "m",
        "messages": [{"role": "user", "content": "0 words"}],
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }


@pytest.mark.parametrize(
    "fake, complaint",
    [
        (FakeServer(output_tokens=3), "counts 3 output tokens, not 4"),
        (FakeServer(status=400), "answered 400"),
        (FakeServer(error="out of blocks"), "out of blocks"),
        (FakeServer(output_tokens=1), "1 pieces of text"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_ends_the_measurement(fake: FakeServer, complaint: str) -> None:
    with _listening(fake) as target, pytest.raises(LoadError, match=complaint):
        _load(target)


def test_a_server_that_is_not_there_ends_the_measurement() -> None:
    with _listening(FakeServer()) as target:
        pass

    with pytest.raises(LoadError, match="fake broke off: ConnectError"):
        _load(target)


def test_a_server_that_is_too_slow_ends_the_measurement() -> None:
    with _listening(FakeServer(pause_s=5)) as target, pytest.raises(LoadError, match=r"7 requests in 0\.1 s"):
        _load(target, timeout_s=0.1)


def test_a_target_that_remembers_is_asked_with_a_salt_and_another_one_never() -> None:
    fake = FakeServer()
    with _listening(fake) as target:
        for asked in (replace(target, takes_salt=True), target):
            run_load(asked.salted("round 3"), PROMPTS[:1], concurrency=1, output_tokens=4, timeout_s=PATIENCE_S)

    assert [body.get("cache_salt") for body in fake.bodies] == ["round 3", None]
    assert all(body["ignore_eos"] for body in fake.bodies)
