"""The steps that lanes are measured with, in several sizes, each concurrent with drafter passes for its sequences.

Knows how much of the KV cache they may take, not how they are timed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from faser.engine.contract.step_times import Role, StepTimes
from faser.engine.execution.overlap.lane_work import given_on_lane, on_lane
from faser.engine.execution.overlap.partition import Lane, Partition, Verify
from faser.engine.execution.runner.batch import RowBatch
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.startup.interference_profile import Cell
from faser.engine.execution.startup.step_profiler import ROWS_EACH, DummyBatchLimits, StepProfiler
from faser.kernels.interface.backend import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What may run at the same time: the target's backend and the draft model's, on the lanes of a partition.

    rows: of the steps to be measured, those first that matter most. contexts: tokens in the cache of each of their
    sequences, ascending. num_sequences: most of a step. budget_s: for all of it, about.
    """

    partition: Partition
    target: Backend
    draft: Backend
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    num_sequences: int
    budget_s: float


def make_cells(
    pair: Pair, runner: Runner, draft_runner: Runner, room: DummyBatchLimits, times: StepTimes
) -> list[Cell]:
    """Steps of several sequences, each concurrent with a drafter pass for as many, as far as the cache allows."""
    cells = []
    counts = dict.fromkeys(min(rows, room.max_rows) for rows in pair.rows)
    most = min(-(-max(counts) // ROWS_EACH), pair.num_sequences)
    drafter = StepProfiler(draft_runner, room, rows_each=1)
    for context in _contexts(pair.contexts, room, most):
        for rows in counts:
            num_sequences = min(-(-rows // ROWS_EACH), pair.num_sequences)
            target = StepProfiler(runner, room, rows_each=-(-rows // num_sequences))
            batch, passes = target.laid_out(rows, context), drafter.laid_out(num_sequences, context)
            cells.append(
                Cell(
                    rows=rows,
                    context=context,
                    verify=_given(target, pair.target, batch),
                    draft=_done(drafter, pair.draft, passes),
                    whole_s=times.tables[Role.STEP].seconds_at(rows, num_sequences * context)
                    + times.tables[Role.PASS].seconds_at(num_sequences),
                )
            )
    return cells


def _given(profiler: StepProfiler, backend: Backend, batch: RowBatch) -> Verify[None]:
    return lambda lane: given_on_lane(backend, lane, lambda: profiler.give(batch))


def _done(profiler: StepProfiler, backend: Backend, batch: RowBatch) -> Callable[[Lane], float]:
    """A call ends with tokens on the host, so the time that it takes is the device's too, of its lane alone."""
    return lambda lane: on_lane(backend, lane, lambda: profiler.once_s(batch))


def _contexts(wanted: tuple[int, ...], room: DummyBatchLimits, num_sequences: int) -> list[int]:
    """The wanted contexts, shortened so that num_sequences sequences fit into the cache, without near-duplicates.

    The first one stays even if the sequences do not fit: then they share blocks.
    """
    cached = room.num_blocks * room.block_size
    found = [max(1, min(wanted[0], room.max_len, cached))]
    for context in wanted[1:]:
        fitting = min(context, room.max_len, cached // num_sequences)
        if fitting >= 2 * found[-1]:
            found.append(fitting)
    return found
