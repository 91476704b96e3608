"""Cost of a span to a request: CPU time of the front-end with and without traces, in turn.

The engine is a fake that answers at once, so nothing else is measured. The collector runs in a process of its own;
its CPU time is not counted, that of the sending thread is.

    python -m benchmarks.serving.span_cost
"""

import asyncio
import json
import multiprocessing
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.connection import Connection

import httpx

from benchmarks.runner import command_line, in_turn
from faser.api.app import ApiSettings, create_app
from faser.cli.bench.estimates import difference
from faser.metrics.server import Metrics
from faser.tracing_sdk import OpenTelemetryTracer
from tests.fake_engine import FakeEngine, saying

OFF, ON, UNSAMPLED = "off", "on", "not sampled"
_ARMS = (OFF, ON, UNSAMPLED)
_PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-"
_HEADERS = {OFF: {}, ON: {"traceparent": f"{_PARENT}01"}, UNSAMPLED: {"traceparent": f"{_PARENT}00"}}


class _Discard(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        del format, arguments


def _collect(tell: Connection) -> None:
    server = HTTPServer(("127.0.0.1", 0), _Discard)
    tell.send(server.server_port)
    server.serve_forever()


async def measure(url: str, *, rounds: int, requests: int) -> dict[str, dict[str, list[float]]]:
    """Microseconds per request, by arm and round: of the event loop's thread, and of the whole process."""
    tracer = OpenTelemetryTracer(url, version="0")
    settings = ApiSettings(served_model_names=("tiny",))
    metrics = Metrics(model_name="tiny", max_model_len=4096)
    clients = {}
    for arm in _ARMS:
        app = create_app(
            FakeEngine(saying("Hello!")), settings=settings, metrics=metrics, tracer=None if arm == OFF else tracer
        )
        transport = httpx.ASGITransport(app)
        clients[arm] = httpx.AsyncClient(transport=transport, base_url="http://x", headers=_HEADERS[arm])
    found: dict[str, dict[str, list[float]]] = {arm: {"loop": [], "process": []} for arm in _ARMS}
    for number in range(-1, rounds):
        for arm in in_turn(_ARMS, number):
            loop_s, process_s = time.thread_time(), time.process_time()
            for _ in range(requests):
                answer = await clients[arm].post("/v1/completions", json={"prompt": "hello", "max_tokens": 6})
                assert answer.status_code == 200
            loop_s, process_s = time.thread_time() - loop_s, time.process_time() - process_s
            if number >= 0:  # the first round warms up
                found[arm]["loop"].append(1e6 * loop_s / requests)
                found[arm]["process"].append(1e6 * process_s / requests)
    await asyncio.to_thread(tracer.close, 5.0)
    return found


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--requests", type=int, default=500)
    arguments = parser.parse_args()
    mine, theirs = multiprocessing.Pipe()
    collector = multiprocessing.Process(target=_collect, args=(theirs,), daemon=True)
    collector.start()
    url = f"http://127.0.0.1:{mine.recv()}/v1/traces"
    found = asyncio.run(measure(url, rounds=arguments.rounds, requests=arguments.requests))
    collector.terminate()
    base = found[OFF]
    for where in ("loop", "process"):
        for arm in (ON, UNSAMPLED):
            more = difference(found[arm][where], base[where])
            print(f"{arm}, {where}: {more.text(0)} µs more than {sum(base[where]) / len(base[where]):.0f}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
