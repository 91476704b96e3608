"""The difference of two scrapes, against a server's metrics object that counts known events."""

import pytest

from benchmarks.generators.agreement import ServerMetrics
from faser.metrics.server import Metrics
from faser.types.statistics import EngineStats


def scraped(metrics: Metrics) -> ServerMetrics:
    return ServerMetrics.parse(metrics.render().decode())


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(model_name="tiny", max_model_len=128)


def test_a_difference_has_what_was_counted_between_two_scrapes(metrics: Metrics) -> None:
    metrics.engine(EngineStats(prompt_tokens=5, generation_tokens=2))
    before = scraped(metrics)
    metrics.engine(EngineStats(prompt_tokens=12, generation_tokens=9))
    since = scraped(metrics).since(before)
    assert since.total("vllm:prompt_tokens_total") == 7
    assert since.total("vllm:generation_tokens_total", model_name="tiny") == 7
    with pytest.raises(KeyError, match="other"):
        since.total("vllm:generation_tokens_total", model_name="other")


def test_a_percentile_lies_in_the_bucket_that_holds_it(metrics: Metrics) -> None:
    """Oracle: the sorted observations. Planted bug: the bucket after it."""
    metrics.tokens(1, 3.0)  # before the first scrape
    before = scraped(metrics)
    times_s = (0.012, 0.03, 0.03, 0.2, 0.6)
    for time_s in times_s:
        metrics.tokens(1, time_s)
    histogram = scraped(metrics).since(before).histogram("vllm:inter_token_latency_seconds")
    assert histogram.count == 5
    assert histogram.mean == pytest.approx(sum(times_s) / 5)
    for percentile, value_s in ((20, 0.012), (50, 0.03), (80, 0.2), (99, 0.6)):
        low_s, high_s = histogram.bracket(percentile)
        assert low_s < value_s <= high_s
    assert histogram.bracket(99) == (0.5, 0.75)


def test_a_server_is_idle_when_nothing_runs_waits_or_holds_kv(metrics: Metrics) -> None:
    assert scraped(metrics).is_idle()
    metrics.engine(EngineStats(kv_usage=0.1))
    assert not scraped(metrics).is_idle()
