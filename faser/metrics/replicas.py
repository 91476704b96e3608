"""The series of several engines as one page: each family once, with the samples of all, told apart by labels."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from faser.metrics.exposition import FamilyText
from faser.metrics.live import LiveRecorder
from faser.metrics.server import Metrics


class ReplicaMetrics:
    """Metrics of several replicas of one model; the first one's have what the front-end counts itself."""

    def __init__(self, each: Sequence[Metrics]) -> None:
        self.each = tuple(each)
        self._joined = FamilyText(_Joined(self.each))

    @property
    def live(self) -> LiveRecorder:
        """Return the recorder of the first replica."""
        return self.each[0].live

    @property
    def traffic(self) -> Callable[..., None]:
        return self.each[0].traffic

    def rejected(self, reason: str) -> None:
        self.each[0].rejected(reason)

    def render(self) -> bytes:
        """Writes all numbers: which of them have changed is known of each replica alone."""
        self._joined.changed = True
        return self._joined.text().encode()


ServerMetrics = Metrics | ReplicaMetrics


class _Joined(Collector):
    def __init__(self, each: Sequence[Metrics]) -> None:
        self._each = each

    def collect(self) -> Iterator[Metric]:
        """Families in the order of the first replica; what only another one has comes last."""
        families: dict[str, Metric] = {}
        for metrics in self._each:
            for family in metrics.page.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        yield from families.values()
