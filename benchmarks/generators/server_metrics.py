"""ServerMetrics: what the server counted itself between two scrapes of /metrics."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_S = 30.0

Key = tuple[str, frozenset[tuple[str, str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Observations of one kind. edges: upper ends of buckets, ascending. cumulative: counts up to each edge."""

    count: int
    total: float
    edges: tuple[float, ...]
    cumulative: tuple[int, ...]

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def bracket(self, percentile: float) -> tuple[float, float]:
        """The bucket, from its lower to its upper end, that holds a percentile. Requires an observation."""
        at = bisect_left(self.cumulative, percentile / 100 * self.count)
        return (self.edges[at - 1] if at else 0.0), self.edges[at]


class ServerMetrics:
    """Samples by name and labels; two scrapes can be subtracted."""

    def __init__(self, samples: dict[Key, float]) -> None:
        self._samples = samples

    @classmethod
    def parse(cls, text: str) -> Self:
        return cls(
            {
                (sample.name, frozenset(sample.labels.items())): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
        )

    @classmethod
    def scrape(cls, url: str) -> Self:
        """url: of the server. Raises httpx.HTTPError."""
        return cls.parse(httpx.get(f"{url}/metrics", timeout=_TIMEOUT_S, trust_env=False).raise_for_status().text)

    def since(self, earlier: "ServerMetrics") -> "ServerMetrics":
        """What was added after the earlier scrape. Series that were not there count from zero."""
        return ServerMetrics({key: value - earlier._samples.get(key, 0.0) for key, value in self._samples.items()})

    def total(self, name: str, **labels: str) -> int:
        """Sum of the samples of this name that have these labels. Raises KeyError if there is none."""
        wanted = set(labels.items())
        found = [value for (own, given), value in self._samples.items() if own == name and wanted <= given]
        if not found:
            raise KeyError(f"/metrics has no {name} with {labels}")
        return round(sum(found))

    def by_label(self, name: str, label: str) -> dict[str, int]:
        """The samples of this name, by the value of one label."""
        return {dict(given)[label]: round(value) for (own, given), value in self._samples.items() if own == name}

    def histogram(self, name: str) -> Histogram:
        """name: without _bucket, _sum or _count. Raises KeyError if there is none."""
        buckets = sorted((float(edge), count) for edge, count in self.by_label(f"{name}_bucket", "le").items())
        sums = [value for (own, _), value in self._samples.items() if own == f"{name}_sum"]
        if not buckets or not sums:
            raise KeyError(f"/metrics has no histogram {name}")
        return Histogram(
            count=self.total(f"{name}_count"),
            total=sum(sums),
            edges=tuple(edge for edge, _ in buckets),
            cumulative=tuple(count for _, count in buckets),
        )

    def is_idle(self) -> bool:
        """Nothing runs, waits or holds a block. Of a scrape, not of a difference."""
        return not any(
            value
            for (name, _), value in self._samples.items()
            if name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        )
