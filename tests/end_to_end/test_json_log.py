"""A server whose log is JSON, with spans: every line of both processes is an object, and says whose it is."""

import json
import signal
from pathlib import Path
from typing import Any

from tests.collector import ReceivedSpan, collecting
from tests.end_to_end.server import END_TIMEOUT_S, START_TIMEOUT_S, end, start
from tests.waiting import until

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
# The engine warns that the last one has no effect on a CPU: a line of its process in every run.
FLAGS = (
    *("--log-format", "json", "--log-level", "debug", "--max-num-seqs", "4"),
    *("--collect-detailed-traces", "all", "--enforce-eager"),
)


def test_every_line_is_json_and_spans_are_those_of_the_requests(tiny_checkpoint: Path, folder: Path) -> None:
    with collecting() as collector:
        variables = {"OTEL_SERVICE_NAME": "tiny", "OTEL_BSP_SCHEDULE_DELAY": "60000"}
        flags = (*FLAGS, "--otlp-traces-endpoint", collector.url)
        server = start(tiny_checkpoint, folder, *flags, variables=variables)
        try:
            until(lambda: '"ready at ' in server.log or server.process.poll() is not None, START_TIMEOUT_S)
            (ready,) = [line for line in lines(server.log) if line["message"].startswith("ready at ")]
            server.url = ready["message"].split()[2]
            headers = {"X-Request-Id": "abc", "traceparent": f"00-{TRACE}-{PARENT}-01"}
            with server.http() as http:
                body = {"prompt": "hello " * 20, "max_tokens": 12, "ignore_eos": True, "cache_salt": "mine"}
                answer = http.post("/v1/completions", json=body, headers=headers).json()
                http.post("/v1/completions", json={**body, "request_id": "def", "unknown_field": 1})
            assert collector.spans == []  # the next batch would be sent after a minute
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(END_TIMEOUT_S) == 0
            first, _ = collector.roots(2)
        finally:
            end(server)
    _check_log(lines(server.log))
    _check_span(first, answer)
    children = collector.children(first)
    assert [child.name for child in children] == ["queue", "prefill", "decode"]


def lines(log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.splitlines()]


def _check_log(found: list[dict[str, Any]]) -> None:
    assert all({"ts", "level", "logger", "message", "process"} <= line.keys() for line in found)
    assert {line["process"] for line in found} == {"front-end", "engine"}
    assert any(line["message"].startswith("warning: --collect-detailed-traces has no effect") for line in found)
    (access,) = [line for line in found if line.get("request_id") == "abc" and line["logger"] == "uvicorn.access"]
    assert (access["method"], access["path"], access["status"]) == ("POST", "/v1/completions", 200)
    assert access["trace_id"] == TRACE
    (access,) = [line for line in found if line.get("request_id") == "def" and line["logger"] == "uvicorn.access"]
    (unknown,) = [line for line in found if "unknown_field" in line["message"]]
    assert unknown["trace_id"] == access["trace_id"]
    assert any(line["message"].startswith("finishing running requests") for line in found)


def _check_span(span: ReceivedSpan, answer: dict[str, Any]) -> None:
    assert (span.trace_id, span.parent_id) == (TRACE, PARENT)
    assert span.resource["service.name"] == "tiny"
    found = span.attributes
    assert found["gen_ai.request.id"] == "abc"
    assert found["gen_ai.response.id"] == answer["id"]
    assert found["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == 12
    reported = answer["metrics"]["faser"]
    for name in ("drafted", "verified", "accepted", "wasted"):
        assert found[f"faser.spec.{name}_tokens"] == reported[name]
    assert found["faser.spec.steps"] == reported["steps"]
    assert 0 <= found["gen_ai.latency.time_in_queue"] < found["gen_ai.latency.time_to_first_token"]
    assert found["gen_ai.latency.time_to_first_token"] < found["gen_ai.latency.e2e"] < 60
