"""The steps with which the interference of two lanes is measured, of several sizes, over dummy sequences.

Knows how much of the KV cache they may use; interference_profile.py times them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from faser.engine.contract.step_times import Role, StepTimes
from faser.engine.execution.overlap.lanes import enqueue_on_lane, run_on_lane
from faser.engine.execution.overlap.partition import Lane, Partition, Verify
from faser.engine.execution.runner.batch import RowBatch
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.startup.step_times.interference_profile import InterferenceCell
from faser.engine.execution.startup.step_times.step_profiler import ROWS_EACH, StepProfiler
from faser.engine.execution.startup.step_times.table_fit import DummyBatchLimits
from faser.kernels.interface.backend import Backend


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
