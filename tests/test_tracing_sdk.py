"""The tracer: whose name spans carry, which variables count, and how it ends."""

import time
from collections.abc import Iterator

import pytest

from faser.errors import ConfigError
from faser.tracing import Phase, SpanContent
from faser.tracing_sdk import OpenTelemetryTracer
from tests.collector import Collector, collecting
from tests.waiting import PATIENCE_S, until


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


def send_one(url: str) -> None:
    tracer = OpenTelemetryTracer(url, version="1.2.3")
    tracer.start([]).end(SpanContent(name="one", attributes={}))
    tracer.close(2.0)


def test_closing_sends_what_is_left(collector: Collector) -> None:
    """The SDK would wait 5 s for more."""
    send_one(collector.url)
    assert [span.name for span in collector.spans] == ["one"]
    assert collector.spans[0].resource["service.name"] == "faser"
    assert collector.spans[0].resource["service.version"] == "1.2.3"


def test_variables_name_the_service_and_bring_headers(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-prod")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test,service.version=9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-api-key=secret")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "gzip")
    send_one(collector.url)
    resource = collector.spans[0].resource
    assert (resource["service.name"], resource["deployment.environment"]) == ("chat-prod", "test")
    assert resource["service.version"] == "9"
    assert collector.headers[0]["x-api-key"] == "secret"
    assert collector.headers[0]["content-encoding"] == "gzip"


def test_the_sampler_is_that_of_the_variable(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    send_one(collector.url)
    assert collector.spans == []


def test_a_variable_that_the_sdk_refuses_is_an_error(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "1")
    with pytest.raises(ConfigError, match=r"a variable OTEL_\* cannot be used: .*max_export_batch_size"):
        OpenTelemetryTracer(collector.url, version="1")


def test_closing_takes_no_longer_than_it_may(caplog: pytest.LogCaptureFixture) -> None:
    """The collector is gone, and the exporter would try again for 10 s."""
    caplog.set_level("INFO")
    with collecting() as gone:
        url = gone.url
    began_s = time.monotonic()
    tracer = OpenTelemetryTracer(url, version="1")
    tracer.start([]).end(SpanContent(name="one", attributes={}))
    tracer.close(0.2)
    assert time.monotonic() - began_s < 9
    until(lambda: len(caplog.records) == 2)
    assert {record.name for record in caplog.records} == {"faser.tracing"}
    assert caplog.messages == [
        f"spans are lost: {url} did not take them within 0.2 s",
        f"spans cannot be sent to {url} and are lost: Connection refused; there is no further line until they are "
        "sent again",
    ]


def test_the_queue_is_bounded_and_ending_a_span_never_waits(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The collector refuses everything; the newest spans are kept."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    collector.status = 503
    tracer = OpenTelemetryTracer(collector.url, version="1")
    for number in range(500):
        tracer.start([]).end(SpanContent(name=str(number), attributes={}))
    assert len(collector.spans) == 0
    collector.status = 200
    tracer.close(PATIENCE_S)
    assert 0 < len(collector.spans) <= 24
    assert any(span.name == "499" for span in collector.spans)
    assert sum("queue of spans is full" in record.getMessage() for record in caplog.records) == 1


def test_phases_are_children_at_the_times_given(collector: Collector) -> None:
    tracer = OpenTelemetryTracer(collector.url, version="1")
    now = time.monotonic()
    span = tracer.start([])
    started = time.monotonic()
    span.end(SpanContent(name="one", attributes={}, phases=[Phase(name="two", began_s=now - 3, ended_s=now - 1)]))
    tracer.close(2.0)
    child, root = sorted(collector.spans, key=lambda each: each.began_ns)
    assert (child.parent_id, child.trace_id) == (root.span_id, root.trace_id)
    assert child.ended_ns - child.began_ns == pytest.approx(2e9, abs=1e3)
    assert 1e9 - 1e6 <= root.began_ns - child.ended_ns <= 1e9 * (1 + started - now) + 1e6
