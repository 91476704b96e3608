"""The series of latency targets: what became of requests that had some, and what the latency model expects.

A prediction is not a number (NaN) while it is not known: before enough requests have ended, and at loads beyond
what the model knows. What was measured stands in vLLM's histograms and in faser_slo_requests_total.
"""

import math
from collections.abc import Sequence

from prometheus_client import Counter, Gauge

from faser.metrics.exposition import MetricsPage, Series
from faser.types.outlook import Decision, Outlook, Target

SHARES = (0.9, 0.99)
# A decision and the target that it is about.
DECISIONS = (
    (Decision.MET, Target.NONE),
    (Decision.RESTORED, Target.NONE),
    *(
        (decision, target)
        for decision in (Decision.WAITS, Decision.REFUSED, Decision.DEGRADED)
        for target in (Target.TTFT, Target.TPOT)
    ),
)


class TargetMetrics:
    """names, labels: names and values of the labels that all series carry. classes: of requests."""

    def __init__(
        self, page: MetricsPage, names: Sequence[str], labels: Sequence[str], classes: Sequence[str]
    ) -> None:
        self._page, self._names, self._labels = page, names, labels
        decided = Counter(
            "faser_admission_decisions",
            "Requests with targets, by what became of them on arrival and the target that cannot be met.",
            (*names, "class", "decision", "target"),
            registry=None,
        )
        text = page.add(decided)
        self._decisions = {
            (name, decision, target): Series(decided.labels(*labels, name, decision, target), text)
            for name in classes
            for decision, target in DECISIONS
        }
        headroom = Gauge(
            "faser_goodput_headroom",
            "Requests per second that may come in addition until only this share meets its targets.",
            (*names, "class", "share"),
            registry=None,
        )
        text = page.add(headroom)
        self._headroom = {
            (name, share): Series(headroom.labels(*labels, name, f"{share:g}"), text)
            for name in classes
            for share in SHARES
        }
        attained = Gauge(
            "faser_predicted_attainment_ratio",
            "Share of a class's requests that should meet their targets.",
            (*names, "class"),
            registry=None,
        )
        text = page.add(attained)
        self._attained = {name: Series(attained.labels(*labels, name), text) for name in classes}
        self._ttft = self._times("ttft", "Predicted time to the first token.", ("mean", "p99"))
        self._tpot = self._times("tpot", "Predicted time per further token.", ("mean",))
        self._latency = self._times("latency", "Predicted time of whole requests.", ("mean", "p99"))
        utilisation = Gauge(
            "faser_predicted_utilisation_ratio",
            "Requests per second that come, over those that can be served.",
            names,
            registry=None,
        )
        self._utilisation = Series(utilisation.labels(*labels), page.add(utilisation))
        self._forget()

    def decided(self, class_name: str, decision: Decision, target: Target) -> None:
        """A request has arrived."""
        self._decisions[class_name, decision, target].inc()

    def expect(self, outlook: Outlook) -> None:
        """The latest outlook."""
        self._forget()
        self._utilisation.set(outlook.utilisation)
        for each in outlook.classes:
            self._attained[each.class_name].set(each.attainment if outlook.is_known else math.nan)
            for share, rate in each.headroom:
                self._headroom[each.class_name, share].set(rate)
        if outlook.is_known:
            self._ttft["mean"].set(outlook.ttft_s)
            self._ttft["p99"].set(outlook.ttft_p99_s)
            self._tpot["mean"].set(outlook.tpot_s)
            self._latency["mean"].set(outlook.latency_s)
            self._latency["p99"].set(outlook.latency_p99_s)

    def _forget(self) -> None:
        predictions = (self._headroom, self._attained, self._ttft, self._tpot, self._latency)
        for series in (self._utilisation, *(each for group in predictions for each in group.values())):
            series.set(math.nan)

    def _times(self, name: str, text: str, statistics: Sequence[str]) -> dict[str, Series]:
        family = Gauge(f"faser_predicted_{name}_seconds", text, (*self._names, "statistic"), registry=None)
        page = self._page.add(family)
        return {each: Series(family.labels(*self._labels, each), page) for each in statistics}
