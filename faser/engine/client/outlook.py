"""Arrivals, and the latency model's expectations of them: LoadMonitor takes notes, outlook_of computes.

Owns the arrivals of the last minute and the lengths of the latest answers. Times are seconds of one clock, which
the caller reads. There are two rates: headroom and utilisation are of what is offered, refused requests included;
times and attainment are those of what has been let in, since refused requests take no steps.
"""

from collections import Counter, deque
from dataclasses import dataclass, replace

from faser.engine.contract.latency_model import Forecast, Lengths, Pace, capacity, highest_rate
from faser.types.outlook import ClassOutlook, Outlook
from faser.types.request import NO_TARGETS, Slo

_WINDOW_S = 60.0
_LEAST_S = 5.0  # of arrivals that say a rate
_LENGTHS_KEPT = 512
_LEAST_LENGTHS = 4
_MOST_CLASSES = 4  # with targets, the most frequent ones: each takes some twenty forecasts
SHARES = (0.9, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Rates, in requests a second. lengths: (prompt, answer). targets: by class, the most frequent first."""

    offered: float
    admitted: float
    lengths: tuple[tuple[int, int], ...]
    targets: tuple[tuple[str, Slo], ...]


class LoadMonitor:
    """began_s: now."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._arrivals: deque[tuple[float, str, Slo]] = deque()
        self._admitted_s: deque[float] = deque()
        self._lengths: deque[tuple[int, int]] = deque(maxlen=_LENGTHS_KEPT)

    def arrived(self, class_name: str, slo: Slo, now_s: float) -> None:
        """A request came, whatever becomes of it."""
        self._arrivals.append((now_s, class_name, slo))
        self._forget(now_s)

    def admitted(self, now_s: float) -> None:
        """The request that came has been let in."""
        self._admitted_s.append(now_s)

    def ended(self, prompt: int, answer: int) -> None:
        """A request was answered to its end, so its lengths are known."""
        self._lengths.append((prompt, answer))

    def load(self, now_s: float) -> Load | None:
        """None: too few requests have come."""
        self._forget(now_s)
        if len(self._lengths) < _LEAST_LENGTHS:
            return None
        window_s = min(max(now_s - self._began_s, _LEAST_S), _WINDOW_S)
        named = Counter((name, slo) for _, name, slo in self._arrivals if slo != NO_TARGETS)
        by_class: dict[str, Slo] = {}
        for (name, slo), _ in named.most_common():
            by_class.setdefault(name, slo)
        return Load(
            offered=len(self._arrivals) / window_s,
            admitted=len(self._admitted_s) / window_s,
            lengths=tuple(self._lengths),
            targets=tuple(by_class.items())[:_MOST_CLASSES],
        )

    def _forget(self, now_s: float) -> None:
        while self._arrivals and self._arrivals[0][0] < now_s - _WINDOW_S:
            self._arrivals.popleft()
        while self._admitted_s and self._admitted_s[0] < now_s - _WINDOW_S:
            self._admitted_s.popleft()


def outlook_of(pace: Pace, load: Load) -> Outlook:
    """Takes some milliseconds, some tens with targets."""
    lengths = Lengths.of(load.lengths)
    forecast = Forecast(pace, lengths, load.admitted)
    classes = tuple(
        ClassOutlook(
            class_name=name,
            attainment=forecast.attainment(slo),
            headroom=tuple((share, highest_rate(pace, lengths, slo, share) - load.offered) for share in SHARES),
        )
        for name, slo in load.targets
    )
    found = Outlook(
        rate=load.offered, capacity=capacity(pace, lengths), is_known=forecast.is_known, classes=classes
    )
    if not forecast.is_known:
        return found
    return replace(
        found,
        ttft_s=forecast.ttft_s,
        ttft_p99_s=forecast.ttft_quantile_s(0.99),
        tpot_s=forecast.tpot_s,
        latency_s=forecast.latency_s,
        latency_p99_s=forecast.latency_quantile_s(0.99),
    )
