"""The span of each request, as a collector receives it from a server over HTTP, with a fake engine."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from faser.api.middleware.key_limits import KeyLimits
from faser.errors import DeadlineError, EngineDiedError, EngineError, OverloadError
from faser.tracing_sdk import OpenTelemetryTracer
from faser.types.answer import RequestOutput, SpeculationSummary
from tests.api.server import MODEL, http_client, serving, settings
from tests.collector import ERROR, INTERNAL, SERVER, UNSET, Collector, ReceivedSpan, collecting
from tests.fake_engine import FakeEngine, saying
from tests.waiting import until

WORD = "zyzzyva"  # in prompts, stop strings, user names and wrong model names
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CHAT = {"messages": [{"role": "user", "content": WORD}], "max_tokens": 6}
TEXT = {"prompt": WORD, "max_tokens": 6}
RESPONSE = {"input": WORD, "max_output_tokens": 6}
MESSAGE = {"model": MODEL, "messages": [{"role": "user", "content": WORD}], "max_tokens": 6}
DIALECTS = [
    ("/v1/chat/completions", CHAT, "chat"),
    ("/v1/completions", TEXT, "text_completion"),
    ("/v1/responses", RESPONSE, "chat"),
    ("/v1/messages", MESSAGE, "chat"),
    ("/invocations", CHAT, "chat"),
    ("/invocations", TEXT, "text_completion"),
]
SUMMARY = SpeculationSummary(
    policy="faser", steps=4, gamma_sum=10, drafts=3, drafted=12, pruned=2, verified=10, accepted=4
)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")  # ms; the SDK's own is 5 s
    with collecting() as collector:
        yield collector


@pytest.fixture
def tracer(collector: Collector) -> Iterator[OpenTelemetryTracer]:
    tracer = OpenTelemetryTracer(collector.url, version="1.2.3")
    yield tracer
    tracer.close(2.0)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(saying("Hello!", cached=3, summaries=[SUMMARY, SUMMARY]))


@pytest.fixture
def http(engine: FakeEngine, tracer: OpenTelemetryTracer) -> Iterator[httpx.Client]:
    with serving(engine, tracer=tracer) as url, http_client(url) as http:
        yield http


def one_span(collector: Collector) -> ReceivedSpan:
    (root,) = collector.roots()
    return root


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path, body, operation", DIALECTS)
def test_every_dialect_has_one_span_that_agrees_with_the_answer(
    http: httpx.Client, collector: Collector, path: str, body: dict[str, Any], operation: str, stream: bool
) -> None:
    answer = http.post(path, json={**body, "stream": stream}, headers={"X-Request-Id": "abc"})
    assert answer.status_code == 200
    root = one_span(collector)
    assert root.name == f"{operation} {MODEL}"
    assert root.kind == SERVER
    assert root.status == UNSET
    found = root.attributes
    assert answer.headers["x-request-id"] == found["gen_ai.request.id"] == "abc"
    assert found["gen_ai.response.id"] in answer.text
    assert found["gen_ai.operation.name"] == operation
    assert found["gen_ai.provider.name"] == "faser"
    assert found["gen_ai.request.model"] == found["gen_ai.response.model"] == MODEL
    assert found["gen_ai.request.max_tokens"] == found["gen_ai.usage.output_tokens"] == 6
    assert found["gen_ai.request.stream"] is stream
    assert found["gen_ai.response.finish_reasons"] == ["stop"]
    assert found["gen_ai.usage.cache_read.input_tokens"] == 3
    assert found["http.route"] == path
    assert found["http.response.status_code"] == 200
    assert found["server.address"] == "127.0.0.1"
    assert found["server.port"] == int(str(http.base_url).rsplit(":", 1)[1].strip("/"))
    assert "error.type" not in found
    if not stream and "usage" in (said := answer.json()):
        counted = said["usage"]
        prompt = counted.get("prompt_tokens") or counted["input_tokens"] + counted.get(
            "cache_read_input_tokens", 0
        )
        assert found["gen_ai.usage.input_tokens"] == prompt


def test_what_sampling_is_in_effect_is_in_the_span(http: httpx.Client, collector: Collector) -> None:
    body = {**CHAT, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 5, "n": 2, "presence_penalty": 0.25}
    http.post("/v1/chat/completions", json={**body, "response_format": {"type": "json_object"}})
    found = one_span(collector).attributes
    sampling = {name.removeprefix("gen_ai.request."): value for name, value in found.items()}
    assert sampling["temperature"] == 0.5
    assert sampling["top_p"] == 0.9
    assert sampling["top_k"] == 7
    assert sampling["seed"] == 5
    assert sampling["choice.count"] == 2
    assert sampling["presence_penalty"] == 0.25
    assert "frequency_penalty" not in sampling
    assert found["gen_ai.output.type"] == "json"
    assert found["gen_ai.response.finish_reasons"] == ["stop", "stop"]
    assert found["gen_ai.usage.output_tokens"] == 12


def test_speculation_is_summed_over_choices(http: httpx.Client, collector: Collector) -> None:
    http.post("/v1/completions", json={**TEXT, "n": 2})
    found = one_span(collector).attributes
    spec = {name.removeprefix("faser.spec."): value for name, value in found.items() if ".spec." in name}
    assert spec == {
        "policy": "faser",
        "method": "auto",
        "class": "default",
        "steps": 8,
        "drafted_tokens": 24,
        "pruned_tokens": 4,
        "verified_tokens": 20,
        "accepted_tokens": 8,
        "wasted_tokens": 12,
        "gamma_mean": 2.5,
        "acceptance_rate": 0.4,
    }


def test_queue_prefill_and_decode_follow_each_other_within_the_span(
    http: httpx.Client, engine: FakeEngine, collector: Collector
) -> None:
    engine.step_s = 0.02
    http.post("/v1/completions", json=TEXT)
    root = one_span(collector)
    children = collector.children(root)
    assert [child.name for child in children] == ["queue", "prefill", "decode"]
    assert {child.kind for child in children} == {INTERNAL}
    assert {child.trace_id for child in children} == {root.trace_id}
    moments = [root.began_ns, *(moment for child in children for moment in (child.began_ns, child.ended_ns))]
    assert [*moments, root.ended_ns] == sorted([*moments, root.ended_ns])
    took_s = {child.name: (child.ended_ns - child.began_ns) / 1e9 for child in children}
    found = root.attributes
    assert took_s["queue"] == pytest.approx(found["gen_ai.latency.time_in_queue"], abs=1e-5)
    assert took_s["prefill"] == pytest.approx(found["gen_ai.latency.time_in_model_prefill"], abs=1e-5)
    assert took_s["decode"] == pytest.approx(found["gen_ai.latency.time_in_model_decode"], abs=1e-5)
    assert took_s["decode"] >= 5 * 0.015  # timers may be early by a millisecond
    assert found["gen_ai.latency.time_to_first_token"] >= 0.015
    assert found["gen_ai.latency.e2e"] == pytest.approx(sum(took_s.values()), abs=1e-4)


def test_the_traceparent_is_the_parent(http: httpx.Client, collector: Collector) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    http.post("/v1/completions", json=TEXT, headers=headers)
    root = one_span(collector)
    assert (root.trace_id, root.parent_id) == (TRACE, PARENT)


@pytest.mark.parametrize(
    "given",
    [
        [("traceparent", f"00-{TRACE}-{PARENT}")],
        [("traceparent", f"00-{'0' * 32}-{PARENT}-01")],
        [("traceparent", f"ff-{TRACE}-{PARENT}-01")],
        [("traceparent", "ä" * 55)],
        [("traceparent", f"00-{TRACE}-{PARENT}-01"), ("traceparent", f"00-{TRACE}-{PARENT}-00")],
    ],
)
def test_a_traceparent_that_is_not_valid_begins_a_trace(
    http: httpx.Client, collector: Collector, given: list[tuple[str, str]]
) -> None:
    headers = [(name.encode(), value.encode("latin-1")) for name, value in given]
    assert http.post("/v1/completions", json=TEXT, headers=headers).status_code == 200
    root = one_span(collector)
    assert root.parent_id == ""
    assert root.trace_id != TRACE


def test_a_trace_that_is_not_sampled_is_not_sent(http: httpx.Client, collector: Collector) -> None:
    http.post("/v1/completions", json=TEXT, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    http.post("/v1/completions", json=TEXT)
    assert one_span(collector).trace_id != TRACE


@pytest.mark.parametrize(
    "body, status, name",
    [
        ({"prompt": WORD, "temperature": WORD}, 400, "BadRequestError"),
        ({"prompt": WORD, "model": WORD}, 404, "NotFoundError"),
        ({"prompt": WORD, "max_tokens": 5000}, 400, "BadRequestError"),
    ],
)
def test_a_clients_mistake_is_named_and_is_no_error_of_the_span(
    http: httpx.Client, collector: Collector, body: dict[str, Any], status: int, name: str
) -> None:
    assert http.post("/v1/completions", json=body).status_code == status
    root = one_span(collector)
    assert root.attributes["error.type"] == name
    assert root.attributes["http.response.status_code"] == status
    assert root.attributes["gen_ai.operation.name"] == "text_completion"
    assert root.status == UNSET


@pytest.mark.parametrize(
    "error, status, name",
    [
        (OverloadError("full", retry_after_s=1), 503, "ServiceUnavailableError"),
        (DeadlineError("late"), 504, "GatewayTimeoutError"),
        (EngineError("broken"), 500, "InternalServerError"),
    ],
)
def test_a_fault_of_the_server_is_an_error_of_the_span(
    http: httpx.Client, engine: FakeEngine, collector: Collector, error: Any, status: int, name: str
) -> None:
    engine.refusals = [error]
    assert http.post("/v1/completions", json=TEXT).status_code == status
    root = one_span(collector)
    assert (root.attributes["error.type"], root.status) == (name, ERROR)
    assert root.name == f"text_completion {MODEL}"
    assert root.attributes["gen_ai.usage.input_tokens"] == len(WORD)


def test_an_exception_that_nothing_expects_is_named(
    http: httpx.Client, engine: FakeEngine, collector: Collector
) -> None:
    engine.script = lambda _: iter([ZeroDivisionError()])
    assert http.post("/v1/completions", json=TEXT).status_code == 500
    root = one_span(collector)
    assert (root.attributes["error.type"], root.status) == ("ZeroDivisionError", ERROR)


def test_a_failure_inside_a_stream_is_an_error_although_the_status_is_200(
    http: httpx.Client, engine: FakeEngine, collector: Collector
) -> None:
    def script(request: Any) -> Iterator[RequestOutput | Exception]:
        yield next(iter(saying("Hello!")(request)))
        yield EngineDiedError("it died")

    engine.script = script
    answer = http.post("/v1/completions", json={**TEXT, "stream": True})
    assert answer.status_code == 200
    root = one_span(collector)
    assert (root.attributes["error.type"], root.status) == ("ServiceUnavailableError", ERROR)
    assert root.attributes["gen_ai.usage.output_tokens"] == 1
    assert "gen_ai.response.finish_reasons" not in root.attributes


@pytest.mark.parametrize("stream", [False, True])
def test_the_span_ends_when_the_client_leaves(
    http: httpx.Client, engine: FakeEngine, collector: Collector, stream: bool
) -> None:
    engine.script, engine.step_s = saying("x" * 2000), 0.01
    body = {**TEXT, "max_tokens": 2000, "stream": stream}
    if stream:
        with http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=body, timeout=1.0)
    root = one_span(collector)
    assert (root.attributes["error.type"], root.status) == ("ClientDisconnect", UNSET)
    assert 0 < root.attributes["gen_ai.usage.output_tokens"] < 2000
    assert [child.name for child in collector.children(root)] == ["queue", "prefill", "decode"]


def test_a_stream_ends_its_span_after_its_last_byte(
    http: httpx.Client, engine: FakeEngine, collector: Collector
) -> None:
    engine.step_s = 0.05
    with http.stream("POST", "/v1/completions", json={**TEXT, "stream": True}) as answer:
        lines = answer.iter_lines()
        while "data" not in next(lines):
            pass
        assert collector.spans == []
        for _ in lines:
            pass
    assert (root := one_span(collector)).ended_ns - root.began_ns >= 6 * 0.04 * 1e9


def test_no_text_of_users_is_sent(http: httpx.Client, engine: FakeEngine, collector: Collector) -> None:
    engine.script = saying(f"secret answer {WORD}")
    bodies: list[tuple[str, Any]] = [(path, {**body, "user": WORD}) for path, body, _ in DIALECTS]
    bodies += [
        ("/v1/completions", {**TEXT, "stop": [WORD], "cache_salt": WORD}),
        ("/v1/completions", {**TEXT, "model": WORD}),
        ("/v1/completions", {**TEXT, WORD: WORD}),
        ("/v1/chat/completions", {"messages": [{"role": WORD, "content": WORD}]}),
        (
            "/v1/chat/completions",
            {**CHAT, "tools": [{"type": "function", "function": {"name": WORD, "parameters": {}}}]},
        ),
        ("/v1/completions", {"prompt": WORD, "temperature": WORD}),
    ]
    for path, body in bodies:
        http.post(f"{path}?{WORD}=1", json=body)
    collector.roots(len(bodies))
    received = b"".join(collector.bodies).lower()
    assert WORD.encode() not in received
    assert b"secret" not in received
    assert b"text_completion" in received


def test_only_requests_for_answers_have_spans(http: httpx.Client, collector: Collector) -> None:
    for path in ("/health", "/metrics", "/v1/models", "/v1/completions"):
        http.get(path)
    http.post("/tokenize", json={"prompt": "hello"})
    http.post("/v1/completions/", json=TEXT)
    assert one_span(collector).attributes["http.route"] == "/v1/completions"


def test_a_request_without_a_key_makes_no_span_and_one_beyond_its_limit_does(
    engine: FakeEngine, tracer: OpenTelemetryTracer, collector: Collector
) -> None:
    chosen = settings(api_keys=("k",), key_limits=KeyLimits(requests_per_minute=1))
    with serving(engine, chosen, tracer=tracer) as url, http_client(url) as http:
        assert http.post("/v1/completions", json=TEXT).status_code == 401
        http.headers["Authorization"] = "Bearer k"
        assert [http.post("/v1/completions", json=TEXT).status_code for _ in range(2)] == [200, 429]
    served, refused = collector.roots(2)
    assert served.name == f"text_completion {MODEL}"
    assert (refused.name, refused.attributes["error.type"]) == ("POST /v1/completions", "RateLimitError")


def test_spans_do_not_withhold_what_answers_withhold(http: httpx.Client, collector: Collector) -> None:
    """The client shares the cache, so it gets neither drafts nor cached tokens; the operator is."""
    answer = http.post("/v1/completions", json=TEXT).json()
    assert "withheld" in json.dumps(answer)
    assert one_span(collector).attributes["faser.spec.drafted_tokens"] == 12


def test_requests_are_answered_while_no_collector_is_there(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, however many batches are lost; one line when a collector is back; nothing on the event loop."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.05")
    with collecting() as gone:
        url = gone.url
    tracer = OpenTelemetryTracer(url, version="1")
    said = [record for record in caplog.records if record.name.startswith(("faser", "opentelemetry"))]
    with serving(engine, tracer=tracer) as server, http_client(server) as http:
        for _ in range(5):
            assert http.post("/v1/completions", json=TEXT).status_code == 200
            until(lambda: warnings(caplog) != [])
        assert len(warnings(caplog)) == 1
        assert f"spans cannot be sent to {url} and are lost" in warnings(caplog)[0]
        with collecting(int(url.split(":")[2].split("/")[0])) as back:
            http.post("/v1/completions", json=TEXT)
            until(lambda: len(warnings(caplog)) == 2)
            assert f"spans are sent to {url} again" in warnings(caplog)[1]
            assert back.spans
    tracer.close(2.0)
    assert said == []


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Everything that tracing logged, the libraries' lines included."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith(("faser.tracing", "opentelemetry")) and record.levelname != "DEBUG"
    ]
