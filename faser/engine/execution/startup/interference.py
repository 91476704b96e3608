"""How much two lanes slow each other down on this machine, for every share of a partition and several steps.

Measured where overlapped drafting is asked for: a step of the target and a pass of the draft model, over dummy
sequences, alone on all processors, each alone in its lane, and both at the same time.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from faser.engine.contract.step_times import FACTORS, InterferenceTable, Role, StepTimes
from faser.engine.execution.overlap.lanes import Lanes, enqueue_on_lane, run_on_lane
from faser.engine.execution.overlap.partition import (
    EVERYTHING,
    Lane,
    Partition,
    PendingResult,
    Verify,
    synchronous,
)
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.startup.step_profiler import ROWS_EACH, DummyBatchLimits, StageProgress, StepProfiler
from faser.types import ProgressCallback

STAGE = "measuring lanes"
_ROUNDS, _LEAST_ROUNDS = 15, 4
_MIN_DRAFTS = 2.0  # drafts that fit into the verification that overlaps with them, at least

Work = Callable[[Lane], object]
# Times over those on the whole machine, in the order of FACTORS.
_Ratios = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LanesSetup:
    """rows: row counts of the steps, the most important first. contexts: tokens in the KV cache of each sequence,
    ascending. num_sequences: most sequences of a step. budget_s: about the seconds for all of it.
    """

    lanes: Lanes
    runner: Runner
    draft_runner: Runner
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    num_sequences: int
    budget_s: float


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


def measure_lanes(
    setup: LanesSetup, limits: DummyBatchLimits, times: StepTimes, report: ProgressCallback
) -> tuple[InterferenceTable, ...]:
    """See measure_interference. times: of the same steps and passes, alone."""
    report(STAGE, 0, 0)
    cells = [
        _cell(setup, limits, times, rows, context)
        for context in lane_contexts(setup, limits)
        for rows in dict.fromkeys(min(rows, limits.max_rows) for rows in setup.rows)
    ]
    return measure_interference(setup.lanes.partition, cells, budget_s=setup.budget_s, report=report)


def lane_contexts(setup: LanesSetup, limits: DummyBatchLimits) -> list[int]:
    """The contexts, shortened so that all sequences fit into the KV cache, without near duplicates.

    The first is kept even where it does not fit: its sequences then share blocks.
    """
    cached = limits.num_blocks * limits.block_size
    most_rows = min(max(setup.rows), limits.max_rows)
    num_sequences = min(-(-most_rows // ROWS_EACH), setup.num_sequences)
    found = [max(1, min(setup.contexts[0], limits.max_len, cached))]
    for context in setup.contexts[1:]:
        fitting = min(context, limits.max_len, cached // num_sequences)
        if fitting >= 2 * found[-1]:
            found.append(fitting)
    return found


def _cell(
    setup: LanesSetup, limits: DummyBatchLimits, times: StepTimes, rows: int, context: int
) -> InterferenceCell:
    """A step of several sequences, with a pass of the drafter for as many sequences."""
    num_sequences, lanes = min(-(-rows // ROWS_EACH), setup.num_sequences), setup.lanes
    target = StepProfiler(setup.runner, limits, rows_each=-(-rows // num_sequences))
    drafter = StepProfiler(setup.draft_runner, limits, rows_each=1)
    step, passes = target.dummy_batch(rows, context), drafter.dummy_batch(num_sequences, context)
    step_s = times.tables[Role.STEP].seconds_at(rows, num_sequences * context, (rows - num_sequences) * context)
    return InterferenceCell(
        rows=rows,
        context=context,
        verify=lambda lane: enqueue_on_lane(lanes.target, lane, lambda: target.enqueue(step)),
        draft=lambda lane: run_on_lane(lanes.draft, lane, lambda: drafter.time_s(passes)),
        whole_s=step_s + times.tables[Role.PASS].seconds_at(num_sequences),
    )


def measure_interference(
    partition: Partition,
    cells: Sequence[InterferenceCell],
    *,
    budget_s: float = 3.0,
    report: ProgressCallback = lambda _stage, _done, _total: None,
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
    share_before, began_s = partition.share, time.perf_counter()
    _round(partition, cells[:1], lambda: None)
    chosen = _affordable(cells, time.perf_counter() - began_s, budget_s)
    progress = StageProgress(report, STAGE, (1 + _ROUNDS) * len(shares) * len(chosen))
    if len(chosen) > 1:
        _round(partition, chosen[1:], progress.advance)
    rounds = [_round(partition, chosen, progress.advance)]
    while len(rounds) < _ROUNDS and time.perf_counter() <= began_s + budget_s:
        rounds.append(_round(partition, chosen, progress.advance))
    progress.finish()
    partition.resize(share_before)
    medians = np.median(rounds, axis=0)  # [shares, cells, FACTORS]
    return tuple(_table(share, chosen, medians[i].tolist()) for i, share in enumerate(shares))


def _affordable(cells: Sequence[InterferenceCell], first_s: float, budget_s: float) -> list[InterferenceCell]:
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
    partition: Partition, cells: Sequence[InterferenceCell], done: Callable[[], None]
) -> list[list[_Ratios]]:
    """[shares][cells], each measured once."""
    found: list[list[_Ratios]] = []
    for share in partition.shares():
        partition.resize(share)
        found.append([])
        for cell in cells:
            found[-1].append(_ratios(partition, cell.verify, cell.draft))
            done()
    return found


def _ratios(partition: Partition, verify: Verify[object], draft: Work) -> _Ratios:
    whole_verify_s = _seconds(lambda lane: verify(lane).wait(), EVERYTHING)
    whole_draft_s = _seconds(draft, EVERYTHING)
    times = math.ceil(_MIN_DRAFTS * whole_draft_s / whole_verify_s)  # verification never ends before a draft
    draft_times: list[float] = []

    def verifications(lane: Lane) -> PendingResult[object]:
        for _ in range(times - 1):
            verify(lane)
        return verify(lane)

    def drafts(lane: Lane, verify_done: Callable[[], bool]) -> None:
        """Until verification ends. As in a real step, the first begins shortly after it."""
        while not (draft_times and verify_done()):
            draft_times.append(_seconds(draft, lane))

    both = partition.run_both(drafts, verifications)
    verifying = partition.run_both(lambda _lane, _verify_done: None, verify)
    drafting = partition.run_both(lambda lane, _done: _seconds(draft, lane), synchronous(lambda _lane: None))
    draft_s = statistics.median(draft_times[:-1] or draft_times)  # the last draft may outlast verification
    return (
        (both.verify_ended_s - both.verify_began_s) / times / whole_verify_s,
        draft_s / whole_draft_s,
        (verifying.verify_ended_s - verifying.verify_began_s) / whole_verify_s,
        drafting.drafted / whole_draft_s,
    )


def _seconds(work: Work, lane: Lane) -> float:
    began_s = time.perf_counter()
    work(lane)
    return time.perf_counter() - began_s


def _table(
    share: float, cells: Sequence[InterferenceCell], ratios: Sequence[Sequence[float]]
) -> InterferenceTable:
    """ratios: of each cell."""
    rows = tuple(sorted({cell.rows for cell in cells}))
    contexts = tuple(sorted({cell.context for cell in cells}))
    of_cell = {(cell.context, cell.rows): each for cell, each in zip(cells, ratios, strict=True)}
    matrices = {
        name: tuple(tuple(of_cell[context, each][i] for each in rows) for context in contexts)
        for i, name in enumerate(FACTORS)
    }
    return InterferenceTable(share=share, rows=rows, contexts=contexts, **matrices)
