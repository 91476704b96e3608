"""Partitions into lanes as they are measured: how a device was divided, and the host's part in each pair of lanes.

    host     called ── gives verification ── given ── drafts: gives passes, waits for them … ── waits ── returned
    device          ┊ verify began ……………………………………………………………………………………………… verify ended
                                              ┊ draft began …………………………………… draft ended

A lane has begun when the device comes to the event before the lane's first kernel. That is as early as the kernel
can begin: if the host has not given it by then, the device waits on. `given` says until when that may be.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch

from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Json
from faser.engine.execution.overlap.lanes import divide_gpu, make_partition
from faser.engine.execution.overlap.partition import Draft, Lane, OverlapResult, Partition, PendingResult, Verify
from faser.engine.execution.overlap.streams import GpuPartition

D = TypeVar("D")
V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Divided:
    """asked: by name. refusal: why another one came, in the driver's words; None: it is the one asked for."""

    asked: str
    partition: Partition
    refusal: str | None

    @property
    def about(self) -> Json:
        shares = [round(share, 4) for share in self.partition.shares()]
        about = {"asked": self.asked, "came": self.partition.name, "refusal": self.refusal, "shares": shares}
        refused = dict(self.partition.refused_splits) if isinstance(self.partition, GpuPartition) else {}
        return {**about, "refused_splits": refused} if refused else about

    def is_measured_as_itself(self, asked: Sequence[str]) -> bool:
        """Return whether this one came for another, and is asked for itself: it need not be measured twice."""
        return self.partition.name != self.asked and self.partition.name in asked


def divide(plan: Plan, name: str) -> Divided:
    """Raises ConfigError where a partition of this name cannot be had at all."""
    if plan.dry_run:
        return Divided(asked=name, partition=make_partition(name), refusal=None)
    device = torch.device("cuda", torch.cuda.current_device())
    partition, refusal = divide_gpu(name, device)
    return Divided(asked=name, partition=partition, refusal=refusal)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """When the pair was asked for, when verification had been given, when each lane began, when the later one
    ended, and when the caller had it."""

    called_s: float
    given_s: float
    draft_began_s: float
    verify_began_s: float
    ended_s: float
    returned_s: float


class TimedPartition:
    """Partition that wraps another one and notes the moments of every pair."""

    def __init__(self, partition: Partition, now: Callable[[], float] = time.perf_counter) -> None:
        self._partition = partition
        self._now = now
        self._pairs: list[_Pair] = []

    @property
    def name(self) -> str:
        return self._partition.name

    @property
    def share(self) -> float:
        return self._partition.share

    def shares(self) -> tuple[float, ...]:
        return self._partition.shares()

    def resize(self, share: float) -> None:
        self._partition.resize(share)

    def run_both(self, draft: Draft[D], verify: Verify[V]) -> OverlapResult[D, V]:
        given_s = 0.0

        def giving(lane: Lane) -> PendingResult[V]:
            nonlocal given_s
            underway = verify(lane)
            given_s = self._now()
            return underway

        joined = self._partition.run_both(draft, giving)
        self._pairs.append(
            _Pair(
                called_s=joined.began_s,
                given_s=given_s,
                draft_began_s=joined.draft_began_s,
                verify_began_s=joined.verify_began_s,
                ended_s=max(joined.draft_ended_s, joined.verify_ended_s),
                returned_s=self._now(),
            )
        )
        return joined

    def close(self) -> None:
        self._partition.close()

    def taken(self) -> Json:
        """Return medians in milliseconds of the pairs since the last call; none of them: only their number.

        draft_gap_ms, verify_gap_ms: from the call of `both` until the lane begins. given_ms: until verification
        has been given. join_ms: from the later end until the return. between_ms: from a pair's later end
        until a lane of the next pair begins, whatever happens in between; None for a single pair.
        """
        pairs, self._pairs = self._pairs, []
        if not pairs:
            return {"pairs": 0}
        between = [
            min(after.draft_began_s, after.verify_began_s) - before.ended_s for before, after in pairwise(pairs)
        ]
        return {
            "pairs": len(pairs),
            "draft_gap_ms": _median_ms([each.draft_began_s - each.called_s for each in pairs]),
            "verify_gap_ms": _median_ms([each.verify_began_s - each.called_s for each in pairs]),
            "given_ms": _median_ms([each.given_s - each.called_s for each in pairs]),
            "join_ms": _median_ms([each.returned_s - each.ended_s for each in pairs]),
            "between_ms": _median_ms(between) if between else None,
        }


def _median_ms(seconds: Sequence[float]) -> float:
    return round(1e3 * statistics.median(seconds), 4)


Divide = Callable[[Plan, str], Divided]
