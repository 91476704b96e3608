"""A cost table, from dummy steps that are timed while no sequence uses the KV cache.

Steps look like verification: a few sequences with several rows each. Each row count is timed as often as it needs
and the time budget allows. The slopes of attention come from pairs of equal steps at a short and a long context:
everything else in them takes the same time, so it cancels out. What an expert of a mixture takes comes from a pair
too: its rows have different tokens, or all the same one, which then choose few experts.
"""

import logging
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from faser.engine.contract.step_times import CostTable, ExpertCosts
from faser.engine.execution.drafting.blocks.loop import BlockRunner
from faser.engine.execution.drafting.heads.head import HeadRunner
from faser.engine.execution.overlap.partition import PendingResult
from faser.engine.execution.runner.batch import RowBatch
from faser.engine.execution.runner.runner import Runner
from faser.kernels.interface.shapes import RowLayout
from faser.types.engine import ProgressCallback

_log = logging.getLogger("faser.engine")

TimedRunner = Runner | HeadRunner | BlockRunner

# In the order of measuring: first where the line of times bends, then with the steps for slopes; both sides of the
# first edges of tiles; then what lies between two counts. MOST_ROW_COUNTS: of all of these.
BENDS, BETWEEN = (1, 8, 32, 256, 4, 16, 2), (64, 128, 3, 48, 96)
MOST_ROW_COUNTS = 18
SHORT_CONTEXT, LONG_CONTEXT = 64, 1024
# Each slope: the row count of the table that it is measured with, sequences, rows of each. More sequences make it
# less sensitive to noise; with more rows of each, further rows take more of the time.
_SLOPES = ((4, 8, 1), (16, 4, 8))
_LEAST_S = 1e-9  # of a step without its attention
_ALIKE_ROWS = 8  # of the step of a mixture that is timed with equal tokens too

ROWS_EACH = 4  # rows of each sequence in a step that verifies
# A shape is timed for so long in all, within these limits: short steps vary more and cost little. One step must do
# where it takes longer than _ONCE_S, which a pause hardly shows in, and there is no time left.
_LONG_ENOUGH_S, _FEWEST_TIMES, _MOST_TIMES, _ONCE_S = 0.1, 2, 15, 0.3
_LEAST_NOW = 3  # times of a step that is only compared with a kept table
_UNDISTURBED = 0.25  # quantile: other processes only ever make a step slower


@dataclass(frozen=True, slots=True, kw_only=True)
class DummyBatchLimits:
    """Limits of dummy sequences: blocks 0 … num_blocks - 1 of block_size tokens, and max_len positions each.

    max_rows: most rows of a step. max_logit_rows: most rows whose logits are computed at once.
    """

    num_blocks: int
    block_size: int
    max_len: int
    max_rows: int
    max_logit_rows: int

    @property
    def longest(self) -> int:
        """Most tokens of one dummy sequence."""
        return max(1, min(self.max_len, self.num_blocks * self.block_size))

    def num_sequences(self, context: int) -> int:
        """Most sequences of this many tokens that share no blocks, and whose last rows' logits come at once."""
        blocks_each = -(-context // self.block_size)
        return min(self.num_blocks // blocks_each, self.max_logit_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """A dummy step: rows_each rows of every sequence, the rest for the last one. They end at `context` tokens.

    alike: all rows have the same token.
    """

    rows: int
    rows_each: int
    context: int
    alike: bool = False

    @property
    def counts(self) -> NDArray[np.int32]:
        """Return the rows of each sequence: [S]."""
        each = min(self.rows_each, self.context)
        counts = np.full(-(-self.rows // each), each, dtype=np.int32)
        counts[-1] = self.rows - each * (len(counts) - 1)
        return counts

    @property
    def kv_tokens(self) -> int:
        """Return, as StepPlan does, the cached tokens of all sequences before the step."""
        return int((self.context - self.counts).sum())

    @property
    def kv_row_tokens(self) -> int:
        """Return, as StepPlan does, the tokens before every further row of a sequence, added up."""
        counts = self.counts.astype(np.int64)
        return int(((counts - 1) * (2 * self.context - counts)).sum()) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertReads:
    """Experts that timed steps of a mixture have read. total, per_row: as in ExpertCosts."""

    total: int
    per_row: int
    of: dict[BatchShape, int] = field(default_factory=dict)


def row_counts(max_rows: int, edges: Sequence[int] = ()) -> tuple[int, ...]:
    """Row counts of a table, up to max_rows, in the order of measuring. edges: as in CostTable."""
    sides: dict[int, None] = {}
    for edge in edges:
        more = sides | dict.fromkeys((edge, edge + 1))
        if len({*BENDS, *more, *BETWEEN}) > MOST_ROW_COUNTS:
            break
        sides = more
    return tuple(each for each in dict.fromkeys((*BENDS, *sides, *BETWEEN)) if each <= max_rows)


def table_shapes(
    limits: DummyBatchLimits, rows_each: int, *, edges: Sequence[int] = (), mixture: bool = False
) -> list[tuple[BatchShape, ...]]:
    """One group for each row count of the table, in their order: the step of that many rows, and steps for slopes.

    rows_each: 1 for passes, which have no further rows, so that only the slope over context is measured. edges: as
    in CostTable. mixture: with a step for the slope over experts.
    """
    short, long = (min(each, limits.longest) for each in (SHORT_CONTEXT, LONG_CONTEXT))
    counts = row_counts(limits.max_rows, edges)
    groups = {rows: [BatchShape(rows=rows, rows_each=rows_each, context=short)] for rows in counts}
    for wanted, sequences, each in _SLOPES:
        if long < 2 * short or (rows_each == 1 and each > 1):
            continue
        count = min(sequences, limits.num_sequences(long), limits.max_rows // each)
        if count:
            group = groups[max(rows for rows in counts if rows <= wanted)]
            group += [BatchShape(rows=count * each, rows_each=each, context=context) for context in (short, long)]
    if mixture:
        group = groups[max(rows for rows in counts if rows <= _ALIKE_ROWS)]
        group.append(replace(group[0], alike=True))
    return [(*dict.fromkeys(group),) for group in groups.values()]


def fit_table(
    seconds: Mapping[BatchShape, float],
    groups: Sequence[tuple[BatchShape, ...]],
    reads: ExpertReads | None = None,
    edges: tuple[int, ...] = (),
) -> CostTable:
    """The table of measured seconds. groups: of table_shapes; those that were not measured are left out.

    reads: of these steps, where the model is a mixture. edges: as in CostTable.
    """
    experts = None
    if reads is not None:
        experts = _fit_experts(seconds, reads)
        seconds = {
            shape: each - experts.expert_s * reads.of[shape] for shape, each in seconds.items() if not shape.alike
        }
    by_kind: dict[tuple[int, int], list[BatchShape]] = {}
    for shape in seconds:
        by_kind.setdefault((shape.rows, shape.rows_each), []).append(shape)
    pairs = sorted((pair for pair in by_kind.values() if len(pair) == 2), key=lambda pair: pair[0].rows_each)
    kv_token_s = kv_row_token_s = 0.0
    for short, long in pairs:
        rise_s = seconds[long] - seconds[short]
        if long.rows_each == 1:
            kv_token_s = max(rise_s, 0.0) / (long.kv_tokens - short.kv_tokens)
        else:
            rise_s -= kv_token_s * (long.kv_tokens - short.kv_tokens)
            kv_row_token_s = max(rise_s, 0.0) / (long.kv_row_tokens - short.kv_row_tokens)
    net = {
        shape.rows: max(
            seconds[shape] - kv_token_s * shape.kv_tokens - kv_row_token_s * shape.kv_row_tokens, _LEAST_S
        )
        for shape, *_ in groups
        if shape in seconds
    }
    return CostTable.measured(
        net, kv_token_s=kv_token_s, kv_row_token_s=kv_row_token_s, experts=experts, edges=edges
    )


def _fit_experts(seconds: Mapping[BatchShape, float], reads: ExpertReads) -> ExpertCosts:
    """Fit costs of experts: by steps with equal and with different tokens, and how alike the latter choose."""
    expert_s = 0.0
    for alike in (shape for shape in seconds if shape.alike):
        different = replace(alike, alike=False)
        if (more := reads.of[different] - reads.of[alike]) > 0:
            expert_s = max(seconds[different] - seconds[alike], 0.0) / more
    costs = ExpertCosts(total=reads.total, per_row=reads.per_row, expert_s=expert_s)
    found = [(shape.rows - 1, costs.further(reads.of[shape])) for shape in seconds if not shape.alike]
    weights = [rows * costs.slope(further) ** 2 for rows, further in found]  # of least squares in experts
    total = sum(weight * rows for weight, (rows, _) in zip(weights, found, strict=True))
    if not total:
        return costs
    share = sum(weight * further for weight, (_, further) in zip(weights, found, strict=True)) / total
    return replace(costs, row_share=share)


@dataclass(slots=True)
class StageProgress:
    """Counts the parts of a stage that are done, and reports them."""

    report: ProgressCallback
    stage: str
    total: int
    done: int = 0

    def advance(self) -> None:
        self.done = min(self.done + 1, self.total)
        self.report(self.stage, self.done, self.total)

    def finish(self) -> None:
        self.report(self.stage, self.total, self.total)


def undisturbed_s(seconds: list[float]) -> float:
    """Return the seconds of a step that nothing else disturbs: the lower quartile; of a few times the least."""
    return min(seconds) if len(seconds) < 1 / _UNDISTURBED else float(np.quantile(seconds, _UNDISTURBED))


class StepProfiler:
    """Times forwards of one runner. rows_each: rows per sequence: several in verification, one in a pass.

    reads: filled with the experts that steps read; None: the runner has no mixture, or they have no price of their
    own. clock: gives seconds.
    """

    def __init__(
        self,
        runner: TimedRunner,
        limits: DummyBatchLimits,
        *,
        rows_each: int = ROWS_EACH,
        reads: ExpertReads | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        self._clock = clock
        self._limits = limits
        self._rows_each = rows_each
        self._reads = reads

    def table(self, budget_s: float, progress: StageProgress) -> CostTable:
        """Step times by row count, measured within about budget_s seconds.

        Every group that fits is timed once, in the order of table_shapes, and again in rounds, so that a busy
        moment of the machine slows all shapes alike. The first group is timed even where there is no time.
        """
        ends_s = self._clock() + budget_s
        edges, mixture = self.edges, self._reads is not None
        groups = table_shapes(self._limits, self._rows_each, edges=edges, mixture=mixture)
        self._fill_cache([shape for group in groups for shape in group])
        self.time_s(self.batch_of(groups[0][0]))  # meets cold memory
        batches: dict[BatchShape, RowBatch] = {}
        times: dict[BatchShape, list[float]] = {}
        for group in groups:
            needed_s = sum(map(_least_s, (_most_s(shape, times) for shape in group))) + _owed_s(times)
            if times and self._clock() + needed_s > ends_s:
                continue
            for shape in group:
                batches[shape] = self.batch_of(shape)
                before = self._runner.experts_read
                times[shape] = [self.time_s(batches[shape])]
                if self._reads is not None:
                    self._reads.of[shape] = self._runner.experts_read - before
            progress.advance()
        self._repeat(batches, times, ends_s)
        measured, largest = (max(group[0].rows for group in some) for some in (_timed(groups, times), groups))
        if measured < largest:
            _log.info("step times: measured up to %d rows within %.0f s, extrapolated above", measured, budget_s)
        found = {shape: undisturbed_s(each) for shape, each in times.items()}
        return fit_table(found, groups, self._reads, edges)

    @property
    def num_row_counts(self) -> int:
        """Return the maximum number of row counts in a table."""
        return len(row_counts(self._limits.max_rows, self.edges))

    @property
    def edges(self) -> tuple[int, ...]:
        """Return the edges of its table."""
        return self._runner.row_edges(min(self._limits.max_rows, max(BENDS)))

    def seconds_now(self, row_counts: Sequence[int], budget_s: float) -> dict[BatchShape, float]:
        """Seconds of a few steps of the table, repeated for about budget_s seconds, at least three times."""
        shapes = [self._short(rows) for rows in row_counts]
        batches = [self.batch_of(shape) for shape in shapes]
        ends_s = self._clock() + budget_s
        times = [[self._warm_s(batch)] for batch in batches]
        while len(times[0]) < _LEAST_NOW or self._clock() < ends_s:
            for batch, each in zip(batches, times, strict=True):
                each.append(self.time_s(batch))
        return {shape: undisturbed_s(each) for shape, each in zip(shapes, times, strict=True)}

    def _repeat(
        self, batches: dict[BatchShape, RowBatch], times: dict[BatchShape, list[float]], ends_s: float
    ) -> None:
        """Time every batch again, in rounds: those that are fast more often. None ends after ends_s."""

        def wanted(shape: BatchShape) -> bool:
            fits = self._clock() + min(times[shape]) <= ends_s
            return fits and len(times[shape]) < _wanted_times(times[shape])

        while again := [shape for shape in batches if wanted(shape)]:
            for shape in filter(wanted, again):
                times[shape].append(self.time_s(batches[shape]))

    def run_largest(self) -> None:
        self.time_s(self.batch_of(self._short(self._limits.max_rows)))

    def dummy_batch(self, rows: int, context: int) -> RowBatch:
        """A step of this many rows, rows_each per sequence, that ends at `context` tokens of each sequence."""
        return self.batch_of(BatchShape(rows=rows, rows_each=self._rows_each, context=context))

    def batch_of(self, shape: BatchShape) -> RowBatch:
        """Sequences may share blocks and overwrite each other's keys and values, which has no effect on times."""
        counts = shape.counts
        query_start = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        starts = shape.context - counts
        positions = np.arange(shape.rows, dtype=np.int32) + np.repeat(starts - query_start[:-1], counts)
        token_ids = np.arange(shape.rows, dtype=np.int64) % self._runner.vocab_size
        return RowBatch(
            token_ids=torch.from_numpy(np.zeros_like(token_ids) if shape.alike else token_ids),
            layout=RowLayout(
                query_start=torch.from_numpy(query_start),
                seq_len=torch.full((len(counts),), shape.context, dtype=torch.int32),
                positions=torch.from_numpy(positions.astype(np.int32)),
                block_table=torch.from_numpy(self._blocks(len(counts), shape.context)),
            ),
            last_rows=query_start[1:].astype(np.int64) - 1,
        )

    def _short(self, rows: int) -> BatchShape:
        return BatchShape(rows=rows, rows_each=self._rows_each, context=min(SHORT_CONTEXT, self._limits.longest))

    def _blocks(self, num_sequences: int, context: int) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
        """Return block tables [num_sequences, blocks]. Sequences share blocks only where there are too few."""
        width = -(-context // self._limits.block_size)
        numbers = np.arange(num_sequences * width, dtype=np.int32) % self._limits.num_blocks
        return numbers.reshape(num_sequences, width)

    def _fill_cache(self, shapes: Sequence[BatchShape]) -> None:
        """Write what the shapes will read: where memory was never written, all reads find one page of zeros.

        The blocks of fewer or shorter sequences are among those of the shape with the most blocks.
        """
        limits = self._limits
        largest = max(shapes, key=lambda shape: len(self._blocks(len(shape.counts), shape.context).ravel()))
        for blocks in self._blocks(len(largest.counts), largest.context):
            for first in range(0, largest.context, limits.max_rows):
                last = min(first + limits.max_rows, largest.context)
                self._runner.fill_cache(
                    RowLayout(
                        query_start=torch.tensor([0, last - first], dtype=torch.int32),
                        seq_len=torch.tensor([last], dtype=torch.int32),
                        positions=torch.arange(first, last, dtype=torch.int32),
                        block_table=torch.from_numpy(blocks[None]),
                    )
                )

    def _warm_s(self, batch: RowBatch) -> float:
        """Seconds of a second run: the first one meets cold memory."""
        self.time_s(batch)
        return self.time_s(batch)

    def time_s(self, batch: RowBatch) -> float:
        began_s = self._clock()
        self.enqueue(batch).wait()
        return self._clock() - began_s

    def enqueue(self, batch: RowBatch) -> PendingResult[None]:
        """A forward, the logits of all its rows and their greedy tokens, as in verification."""
        self._runner.forward(batch)
        num_rows, most = len(batch.token_ids), self._limits.max_logit_rows
        token_ids = [
            self._runner.logits(np.arange(first, min(first + most, num_rows))).argmax(dim=-1)
            for first in range(0, num_rows, most)
        ]

        def wait() -> None:
            for each in token_ids:
                each.tolist()

        return PendingResult(wait)


def _wanted_times(seconds: list[float]) -> int:
    """Return how often to time a step that took these seconds, if there is time."""
    return min(max(int(_LONG_ENOUGH_S / min(seconds)), _FEWEST_TIMES), _MOST_TIMES)


def _least_s(step_s: float) -> float:
    """Seconds until a step is timed as often as it must be."""
    return step_s if step_s >= _ONCE_S else step_s * _FEWEST_TIMES


def _owed_s(times: dict[BatchShape, list[float]]) -> float:
    """Seconds until every shape is timed as often as it must be, each having been timed once."""
    return sum(_least_s(each) - each for (each,) in times.values())


def _most_s(shape: BatchShape, times: dict[BatchShape, list[float]]) -> float:
    """The most that a step takes: as long as one of more rows, or as one of fewer for each of its rows."""
    above = [each for timed, (each,) in times.items() if timed.rows >= shape.rows]
    below = [each * shape.rows / timed.rows for timed, (each,) in times.items() if timed.rows < shape.rows]
    return min([*above, *below], default=0.0)


def _timed(groups: list[tuple[BatchShape, ...]], times: Container[BatchShape]) -> list[tuple[BatchShape, ...]]:
    return [group for group in groups if group[0] in times]
