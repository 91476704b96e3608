"""Measures how much two lanes slow each other on this machine, for every share of a partition and several steps.

Runs the given calls repeatedly. Knows nothing of what they compute; decides only for which cells there is time.

The steps with which the interference of two lanes is measured, of several sizes, over dummy sequences.

Knows how much of the KV cache they may use; interference_profile.py times them.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from faser.engine.contract.step_times import InterferenceTable, Role, StepTimes
from faser.engine.execution.overlap.lanes import enqueue_on_lane, run_on_lane
from faser.engine.execution.overlap.partition import (
    EVERYTHING,
    Lane,
    OverlapResult,
    Partition,
    PendingResult,
    Verify,
    synchronous,
)
from faser.engine.execution.runner.batch import RowBatch
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.startup.step_profiler import ROWS_EACH, DummyBatchLimits, StepProfiler
from faser.kernels.interface.backend import Backend

_ROUNDS, _LEAST_ROUNDS = 15, 4
_MIN_DRAFTS = 2.0  # drafts that fit into the verification that overlaps with them, at least

D = TypeVar("D")
Work = Callable[[Lane], object]
DoneOfTotal = Callable[[int, int], None]  # reports how many parts are done, of how many
# Times over those on the whole machine: verify and draft while they overlap, then verify and draft alone in their
# lanes.
_Ratios = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceCell:
    """One size of step and the two calls that are timed. rows: of the step. context: tokens of each sequence.

    verify, draft: a forward of the target, and a pass of the drafter for as many sequences, on the processors of
    the given lane. A draft ends with tokens on the host. whole_s: expected time of both in turns on all
    processors, in any unit common to all cells.
    """

    rows: int
    context: int
    verify: Verify[object]
    draft: Work
    whole_s: float


def measure_interference(
    partition: Partition,
    cells: Sequence[InterferenceCell],
    *,
    budget_s: float = 3.0,
    progress: DoneOfTotal = lambda _done, _total: None,
) -> tuple[InterferenceTable, ...]:
    """One InterferenceTable per share, ascending by share; none for a partition whose lanes run in turns.

    cells: every combination of some row counts and some contexts, the most important first. The first cell is
    always measured. From the time of one round of it follows for which others there is time: first for other row
    counts at its context, then for other contexts at these row counts. The tables lack the cells left out.

    After one warm-up round, rounds over all shares and cells until budget_s is over, one at least. The result is
    the median over rounds of the ratio within a round: a busy moment of the machine slows both sides of a ratio.
    The partition's share is the same afterwards.
    """
    shares = partition.shares()
    if not shares:
        return ()
    share_before = partition.share
    ends_s = time.perf_counter() + budget_s
    first_s = _round(partition, cells[:1], lambda _share, _cell, _ratios: None)
    chosen = _affordable(cells, first_s, budget_s)
    counter = _ProgressCounter(progress, (1 + _ROUNDS) * len(shares) * len(chosen))
    if len(chosen) > 1:
        _round(partition, chosen[1:], lambda _share, _cell, _ratios: counter.advance())
    found: dict[tuple[float, int, int], list[_Ratios]] = {
        (share, cell.rows, cell.context): [] for share in shares for cell in chosen
    }

    def keep(share: float, cell: InterferenceCell, ratios: _Ratios) -> None:
        found[share, cell.rows, cell.context].append(ratios)
        counter.advance()

    for done in range(_ROUNDS):
        if done and time.perf_counter() > ends_s:
            break
        _round(partition, chosen, keep)
    counter.finish()
    partition.resize(share_before)
    medians = {at: _medians(rounds) for at, rounds in found.items()}
    return tuple(_table(share, chosen, medians) for share in shares)


class _ProgressCounter:
    def __init__(self, progress: DoneOfTotal, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def advance(self) -> None:
        self._done = min(self._done + 1, self._total)
        self._progress(self._done, self._total)

    def finish(self) -> None:
        self._progress(self._total, self._total)


def _affordable(cells: Sequence[InterferenceCell], first_s: float, budget_s: float) -> Sequence[InterferenceCell]:
    """The cells with time for a warm-up and _LEAST_ROUNDS: all combinations of some row counts and some contexts.

    first_s: time of one round of the first cell.
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


def _round(
    partition: Partition,
    cells: Sequence[InterferenceCell],
    keep: Callable[[float, InterferenceCell, _Ratios], None],
) -> float:
    """Measure every cell at every share once. Returns the seconds that took."""
    began_s = time.perf_counter()
    for share in partition.shares():
        partition.resize(share)
        for cell in cells:
            keep(share, cell, _ratios(partition, cell.verify, cell.draft))
    return time.perf_counter() - began_s


def _ratios(partition: Partition, verify: Verify[object], draft: Work) -> _Ratios:
    whole = _verify_seconds(verify, EVERYTHING), _seconds(draft, EVERYTHING)
    times = math.ceil(_MIN_DRAFTS * whole[1] / whole[0])  # so that verification never ends before a draft
    overlapped = _overlapped(partition, _repeated(verify, times), draft)
    alone = (
        _verify_s(partition.run_both(lambda _lane, _verify_done: None, verify)),
        partition.run_both(
            lambda lane, _verify_done: _seconds(draft, lane), synchronous(lambda _lane: None)
        ).drafted,
    )
    return overlapped[0] / times / whole[0], overlapped[1] / whole[1], alone[0] / whole[0], alone[1] / whole[1]


def _overlapped(partition: Partition, verify: Verify[object], draft: Work) -> tuple[float, float]:
    """Seconds of verification while drafts run throughout, and the median seconds of these drafts.

    As in a real step, the first draft begins shortly after verification.
    """
    times: list[float] = []

    def drafts(lane: Lane, verify_done: Callable[[], bool]) -> None:
        while not (times and verify_done()):
            times.append(_seconds(draft, lane))

    joined = partition.run_both(drafts, verify)
    return _verify_s(joined), statistics.median(times[:-1] or times)  # the last draft may outlast verification


def _repeated(verify: Verify[object], times: int) -> Verify[object]:
    """Several verifications in a row; the result is the last one's."""

    def repeated(lane: Lane) -> PendingResult[object]:
        for _ in range(times - 1):
            verify(lane)
        return verify(lane)

    return repeated


def _verify_s(joined: OverlapResult[D, object]) -> float:
    return joined.verify_ended_s - joined.verify_began_s


def _medians(rounds: list[_Ratios]) -> _Ratios:
    verify, draft, verify_alone, draft_alone = (statistics.median(each) for each in zip(*rounds, strict=True))
    return verify, draft, verify_alone, draft_alone


def _table(
    share: float, cells: Sequence[InterferenceCell], medians: dict[tuple[float, int, int], _Ratios]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceSetup:
    """The lanes to measure, with the backends of target and draft model, and the sizes of steps.

    rows: row counts of the steps, the most important first. contexts: tokens in the KV cache of each sequence,
    ascending. num_sequences: most sequences of a step. budget_s: about the seconds for all of it.
    """

    partition: Partition
    target: Backend
    draft: Backend
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    num_sequences: int
    budget_s: float


def make_cells(
    setup: InterferenceSetup, runner: Runner, draft_runner: Runner, limits: DummyBatchLimits, times: StepTimes
) -> list[InterferenceCell]:
    """Steps of several sequences, each with a pass of the drafter for as many sequences, as far as they fit."""
    cells = []
    counts = dict.fromkeys(min(rows, limits.max_rows) for rows in setup.rows)
    most = min(-(-max(counts) // ROWS_EACH), setup.num_sequences)
    drafter = StepProfiler(draft_runner, limits, rows_each=1)
    for context in _contexts(setup.contexts, limits, most):
        for rows in counts:
            num_sequences = min(-(-rows // ROWS_EACH), setup.num_sequences)
            target = StepProfiler(runner, limits, rows_each=-(-rows // num_sequences))
            batch, passes = target.dummy_batch(rows, context), drafter.dummy_batch(num_sequences, context)
            cells.append(
                InterferenceCell(
                    rows=rows,
                    context=context,
                    verify=_verify(target, setup.target, batch),
                    draft=_draft(drafter, setup.draft, passes),
                    whole_s=times.tables[Role.STEP].seconds_at(
                        rows, num_sequences * context, (rows - num_sequences) * context
                    )
                    + times.tables[Role.PASS].seconds_at(num_sequences),
                )
            )
    return cells


def _verify(profiler: StepProfiler, backend: Backend, batch: RowBatch) -> Verify[None]:
    return lambda lane: enqueue_on_lane(backend, lane, lambda: profiler.enqueue(batch))


def _draft(profiler: StepProfiler, backend: Backend, batch: RowBatch) -> Callable[[Lane], float]:
    """A call ends with tokens on the host, so its duration includes the device's work on this lane."""
    return lambda lane: run_on_lane(backend, lane, lambda: profiler.time_s(batch))


def _contexts(wanted: tuple[int, ...], limits: DummyBatchLimits, num_sequences: int) -> list[int]:
    """The wanted contexts, shortened so that num_sequences of them fit into the KV cache, without near duplicates.

    The first is kept even where it does not fit: its sequences then share blocks.
    """
    cached = limits.num_blocks * limits.block_size
    found = [max(1, min(wanted[0], limits.max_len, cached))]
    for context in wanted[1:]:
        fitting = min(context, limits.max_len, cached // num_sequences)
        if fitting >= 2 * found[-1]:
            found.append(fitting)
    return found
