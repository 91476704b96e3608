"""Measures what two lanes cost each other on this machine, for every share a partition offers.

Runs the two calls it is given, again and again. Knows nothing of what they do, and decides nothing.
"""

import statistics
import threading
import time
from collections.abc import Callable

from faser.engine.co_run import CoRun
from faser.engine.partition import EVERYTHING, Lane, Partition

_ROUNDS = 15
_MEET_S = 10.0  # for the other lane to begin

Work = Callable[[Lane], object]
_Ratios = tuple[float, float, float, float]  # verify and draft beside each other, then alone on their lanes


def measure_slowdown(
    partition: Partition, verify: Work, draft: Work, *, budget_s: float = 3.0
) -> tuple[CoRun, ...]:
    """One CoRun for every share, ascending; none where nothing runs at the same time.

    verify, draft: a typical forward of the target and a typical draft, on the cores of the lane they are given;
    with EVERYTHING, alone on all. Rounds over all shares until budget_s is over, at least one, after one that only
    warms up; what counts is the median over rounds of the ratio within a round, so that a busy moment of the
    machine slows both sides of a ratio. The partition has its share back afterwards.
    """
    shares = partition.shares()
    share_before = partition.share
    found: dict[float, list[_Ratios]] = {share: [] for share in shares}
    ends_s = time.perf_counter() + budget_s
    for done in range(-1, _ROUNDS):
        if not shares or (done > 0 and time.perf_counter() > ends_s):
            break
        for share in shares:
            partition.resize(share)
            ratios = _one_round(partition, verify, draft)
            if done >= 0:
                found[share].append(ratios)
    if shares:
        partition.resize(share_before)
    return tuple(_medians(share, rounds) for share, rounds in found.items())


def _one_round(partition: Partition, verify: Work, draft: Work) -> _Ratios:
    whole = _seconds(verify, EVERYTHING), _seconds(draft, EVERYTHING)
    beside = _beside(partition, verify, draft)
    alone = (
        partition.both(lambda _lane, _done: None, lambda lane: _seconds(verify, lane)).verified,
        partition.both(lambda lane, _done: _seconds(draft, lane), lambda _lane: None).drafted,
    )
    return beside[0] / whole[0], beside[1] / whole[1], alone[0] / whole[0], alone[1] / whole[1]


def _beside(partition: Partition, verify: Work, draft: Work) -> tuple[float, float]:
    """Seconds of each while the other lane is busy: the quicker one is repeated until the slower one is done."""
    meet = threading.Barrier(2)
    verified, drafted = threading.Event(), threading.Event()

    def company(work: Work, lane: Lane, mine: threading.Event, other: threading.Event) -> float:
        times: list[float] = []
        try:
            meet.wait(_MEET_S)
            while not (times and other.is_set()):
                times.append(_seconds(work, lane))
                mine.set()
        finally:
            mine.set()
        return statistics.median(times[:-1] or times)  # the last one may have been alone for a part

    joined = partition.both(
        lambda lane, _done: company(draft, lane, drafted, verified),
        lambda lane: company(verify, lane, verified, drafted),
    )
    return joined.verified, joined.drafted


def _medians(share: float, rounds: list[_Ratios]) -> CoRun:
    verify, draft, verify_alone, draft_alone = (statistics.median(each) for each in zip(*rounds, strict=True))
    return CoRun(share=share, verify=verify, draft=draft, verify_alone=verify_alone, draft_alone=draft_alone)


def _seconds(work: Work, lane: Lane) -> float:
    began_s = time.perf_counter()
    work(lane)
    return time.perf_counter() - began_s
