"""Expectations of the latency model, and decisions on requests with targets."""

from dataclasses import dataclass
from enum import StrEnum


class Decision(StrEnum):
    """Decisions on a request with targets when it arrives. MET: all of them should be met.

    RESTORED: later; targets that were given up should be met after all.
    """

    MET = "met"
    WAITS = "waits"
    REFUSED = "refused"
    DEGRADED = "degraded"
    RESTORED = "restored"


class Target(StrEnum):
    """The target that a decision is about. NONE: all are met."""

    NONE = "none"
    TTFT = "ttft"
    TPOT = "tpot"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassOutlook:
    """Share of the requests of one class with targets that should meet them at the present rate.

    headroom: by share of requests that meet their targets, how many more requests a second of all classes may come
    until only that share of this class does; below 0 where fewer do already.
    """

    class_name: str
    attainment: float
    headroom: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Expectations of the latency model at the present rate, in requests a second; times in seconds.

    is_known: False: the load is beyond what the model knows, and times are not reported.
    """

    rate: float
    capacity: float
    is_known: bool
    ttft_s: float = 0.0
    ttft_p99_s: float = 0.0
    tpot_s: float = 0.0
    latency_s: float = 0.0
    latency_p99_s: float = 0.0
    classes: tuple[ClassOutlook, ...] = ()

    @property
    def utilisation(self) -> float:
        return self.rate / self.capacity if self.capacity else 0.0
