"""MetricsPage: the series as Prometheus' text, of which a scrape writes only what has changed since the last one.

An endpoint picker may scrape twenty times a second, and writing all series anew takes longer than a step. So each
family keeps its text until one of its series changes; then its numbers are written behind the names that it had.
How names, labels and values look is the library's business: it writes a family once, and again when its labels
change.
"""

from collections.abc import Callable, Iterator

from prometheus_client import Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

_written: Callable[[float], str] = floatToGoString


class MetricsPage(Collector):
    """The families of one page, in the order in which they were added."""

    def __init__(self) -> None:
        self._families: list[FamilyText] = []

    def add(self, collector: Collector) -> "FamilyText":
        self._families.append(FamilyText(collector))
        return self._families[-1]

    def collect(self) -> Iterator[Metric]:
        for each in self._families:
            yield from each.collector.collect()

    def render(self) -> bytes:
        return "".join([each.text() for each in self._families]).encode()


class FamilyText:
    """The text of what a collector collects. changed: set it after every change of a series."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self.changed = True
        self._text = ""
        self._known: list[tuple[str, dict[str, str]]] | None = None  # name and labels of each sample
        self._names: list[str] = []  # what stands before each number: comments, name, labels
        self._end = ""  # comments after the last number

    def text(self) -> str:
        if self.changed:
            self.changed = False
            samples = [sample for metric in self.collector.collect() for sample in metric.samples]
            known = [(sample.name, sample.labels) for sample in samples]
            if known != self._known:
                self._learn_names()
                self._known = known
            pairs = zip(self._names, samples, strict=True)
            self._text = "".join([f"{name} {_written(sample.value)}\n" for name, sample in pairs]) + self._end
        return self._text

    def _learn_names(self) -> None:
        self._names, comments = [], ""
        for line in generate_latest(self.collector).decode().splitlines():
            if line.startswith("#"):
                comments += line + "\n"
            else:
                self._names.append(comments + line.rpartition(" ")[0])
                comments = ""
        self._end = comments


class Series:
    """One series of a family, which says that the family has changed. A counter has `inc`, a gauge `set` …

    Other methods than those of its kind are not called.
    """

    __slots__ = ("_family", "_series")

    def __init__(self, series: Counter | Gauge | Histogram, family: FamilyText) -> None:
        self._series = series
        self._family = family

    def inc(self, amount: float = 1) -> None:
        self._series.inc(amount)  # type: ignore[union-attr]
        self._family.changed = True

    def set(self, value: float) -> None:
        self._series.set(value)  # type: ignore[union-attr]
        self._family.changed = True

    def observe(self, amount: float) -> None:
        self._series.observe(amount)  # type: ignore[union-attr]
        self._family.changed = True
