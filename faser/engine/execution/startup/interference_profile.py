"""Measures what two lanes cost each other on this machine, for every share a partition offers and several steps.

Runs the calls it is given, again and again. Knows nothing of what they do, and decides nothing but for how many
of them there is time.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from faser.engine.contract.interference import InterferenceTable
from faser.engine.execution.overlap.partition import (
    EVERYTHING,
    Lane,
    OverlapResult,
    Partition,
    PendingResult,
    Verify,
    synchronous,
)

_ROUNDS, _LEAST_ROUNDS = 15, 4
_COMPANY = 2.0  # drafts that a verification beside them has time for, at least

D = TypeVar("D")
Work = Callable[[Lane], object]
Progress = Callable[[int, int], None]
_Ratios = tuple[float, float, float, float]  # verify and draft beside each other, then alone on their lanes


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One kind of step: rows of it, tokens of context of its sequences, and the two calls that are timed.

    verify, draft: a forward of the target, a pass of the drafter for as many sequences, on the processors of the
    lane they are given; with EVERYTHING, alone on all. A draft ends with tokens on the host.
    whole_s: that both should take in turns, in any unit common to all cells.
    """

    rows: int
    context: int
    verify: Verify[object]
    draft: Work
    whole_s: float


def measure_slowdown(
    partition: Partition,
    cells: Sequence[Cell],
    *,
    budget_s: float = 3.0,
    progress: Progress = lambda _done, _total: None,
) -> tuple[InterferenceTable, ...]:
    """One InterferenceTable for every share, ascending; none where nothing runs at the same time.

    cells: every pair of some rows and some contexts, those first that matter most. The first is always measured.
    What a round of it takes tells for which of the others there is time: first for other rows at its context, then
    for other contexts at all these rows; what is left out is not in the answer.

    Rounds over all shares and cells until budget_s is over, at least one, after one that only warms up. What
    counts is the median over rounds of the ratio within a round, so that a busy moment of the machine slows both
    sides of a ratio. The partition has its share back afterwards.
    """
    shares = partition.shares()
    if not shares:
        return ()
    share_before = partition.share
    ends_s = time.perf_counter() + budget_s
    first_s = _round(partition, cells[:1], lambda _share, _cell, _ratios: None)
    chosen = _affordable(cells, first_s, budget_s)
    report = _Report(progress, (1 + _ROUNDS) * len(shares) * len(chosen))
    if len(chosen) > 1:
        _round(partition, chosen[1:], lambda _share, _cell, _ratios: report.advance())
    found: dict[tuple[float, int, int], list[_Ratios]] = {
        (share, cell.rows, cell.context): [] for share in shares for cell in chosen
    }

    def keep(share: float, cell: Cell, ratios: _Ratios) -> None:
        found[share, cell.rows, cell.context].append(ratios)
        report.advance()

    for done in range(_ROUNDS):
        if done and time.perf_counter() > ends_s:
            break
        _round(partition, chosen, keep)
    report.finish()
    partition.resize(share_before)
    medians = {at: _medians(rounds) for at, rounds in found.items()}
    return tuple(_gathered(share, chosen, medians) for share in shares)


class _Report:
    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def advance(self) -> None:
        self._done = min(self._done + 1, self._total)
        self._progress(self._done, self._total)

    def finish(self) -> None:
        self._progress(self._total, self._total)


def _affordable(cells: Sequence[Cell], first_s: float, budget_s: float) -> Sequence[Cell]:
    """Those for which there is time for _LEAST_ROUNDS, and one before: every pair of some rows and some contexts.

    first_s: a round of the first cell.
    """
    least_s = (1 + _LEAST_ROUNDS) * first_s / cells[0].whole_s
    rows, contexts = {cells[0].rows}, {cells[0].context}
    spent_s = least_s * cells[0].whole_s
    for cell in cells:
        if cell.context in contexts and cell.rows not in rows and spent_s + least_s * cell.whole_s <= budget_s:
            rows.add(cell.rows)
            spent_s += least_s * cell.whole_s
    for context in dict.fromkeys(cell.context for cell in cells):
        line_s = least_s * sum(cell.whole_s for cell in cells if cell.context == context and cell.rows in rows)
        if context not in contexts and spent_s + line_s <= budget_s:
            contexts.add(context)
            spent_s += line_s
    return [cell for cell in cells if cell.rows in rows and cell.context in contexts]


def _round(partition: Partition, cells: Sequence[Cell], keep: Callable[[float, Cell, _Ratios], None]) -> float:
    """Every cell at every share once. Returns seconds."""
    began_s = time.perf_counter()
    for share in partition.shares():
        partition.resize(share)
        for cell in cells:
            keep(share, cell, _ratios(partition, cell.verify, cell.draft))
    return time.perf_counter() - began_s


def _ratios(partition: Partition, verify: Verify[object], draft: Work) -> _Ratios:
    whole = _verify_seconds(verify, EVERYTHING), _seconds(draft, EVERYTHING)
    times = math.ceil(_COMPANY * whole[1] / whole[0])  # so that the drafts are never alone
    beside = _beside(partition, _repeated(verify, times), draft)
    alone = (
        _verify_s(partition.run_both(lambda _lane, _over: None, verify)),
        partition.run_both(lambda lane, _over: _seconds(draft, lane), synchronous(lambda _lane: None)).drafted,
    )
    return beside[0] / times / whole[0], beside[1] / whole[1], alone[0] / whole[0], alone[1] / whole[1]


def _beside(partition: Partition, verify: Verify[object], draft: Work) -> tuple[float, float]:
    """Seconds of verification while drafts are made as long as it lasts, and of a draft among these.

    As in a real step the first draft comes a little after verification has begun.
    """
    times: list[float] = []

    def drafts(lane: Lane, is_over: Callable[[], bool]) -> None:
        while not (times and is_over()):
            times.append(_seconds(draft, lane))

    joined = partition.run_both(drafts, verify)
    return _verify_s(joined), statistics.median(times[:-1] or times)  # the last may have been alone for a part


def _repeated(verify: Verify[object], times: int) -> Verify[object]:
    """One behind the other: the last is over when all are."""

    def given(lane: Lane) -> PendingResult[object]:
        for _ in range(times - 1):
            verify(lane)
        return verify(lane)

    return given


def _verify_s(joined: OverlapResult[D, object]) -> float:
    return joined.verify_ended_s - joined.verify_began_s


def _medians(rounds: list[_Ratios]) -> _Ratios:
    verify, draft, verify_alone, draft_alone = (statistics.median(each) for each in zip(*rounds, strict=True))
    return verify, draft, verify_alone, draft_alone


def _gathered(
    share: float, cells: Sequence[Cell], medians: dict[tuple[float, int, int], _Ratios]
) -> InterferenceTable:
    rows = tuple(sorted({cell.rows for cell in cells}))
    contexts = tuple(sorted({cell.context for cell in cells}))
    verify, draft, verify_alone, draft_alone = (
        tuple(tuple(medians[share, each, context][factor] for each in rows) for context in contexts)
        for factor in range(4)
    )
    return InterferenceTable(
        share=share,
        rows=rows,
        contexts=contexts,
        verify=verify,
        draft=draft,
        verify_alone=verify_alone,
        draft_alone=draft_alone,
    )


def _verify_seconds(verify: Verify[object], lane: Lane) -> float:
    return _seconds(lambda lane: verify(lane).wait(), lane)


def _seconds(work: Work, lane: Lane) -> float:
    began_s = time.perf_counter()
    work(lane)
    return time.perf_counter() - began_s
