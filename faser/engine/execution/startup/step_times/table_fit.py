"""Which dummy steps a cost table is measured with, and the table that their times make.

Counts and seconds only; step_profiler.py runs the steps. The slopes of attention come from pairs of equal steps at
a short and a long context: everything else in them takes the same time, so it cancels out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from faser.engine.contract.step_times import CostTable

# In the order of measuring: first where the line of times bends, then with the steps for slopes, then
# what lies between two counts. With 7 and with 13 rows the native kernels begin another tile of 6 rows.
ROW_COUNTS = (1, 8, 32, 256, 4, 16, 2, 64, 128, 3, 6, 7, 12, 13, 24, 48, 96, 192)
SHORT_CONTEXT, LONG_CONTEXT = 64, 1024
# Each slope: the row count of the table that it is measured with, sequences, rows of each. More sequences make it
# less sensitive to noise; with more rows of each, further rows take more of the time.
_SLOPES = ((4, 8, 1), (16, 4, 8))
_LEAST_S = 1e-9  # of a step without its attention


@dataclass(frozen=True, slots=True, kw_only=True)
class DummyBatchLimits:
    """What dummy sequences may use: blocks 0 … num_blocks - 1 of block_size tokens, and max_len positions each.

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
    """A dummy step: rows_each rows of every sequence, the rest for the last one. They end at `context` tokens."""

    rows: int
    rows_each: int
    context: int

    @property
    def counts(self) -> NDArray[np.int32]:
        """[S] rows of each sequence."""
        each = min(self.rows_each, self.context)
        counts = np.full(-(-self.rows // each), each, dtype=np.int32)
        counts[-1] = self.rows - each * (len(counts) - 1)
        return counts

    @property
    def kv_tokens(self) -> int:
        """As in StepPlan: cached tokens of all sequences before the step."""
        return int((self.context - self.counts).sum())

    @property
    def kv_row_tokens(self) -> int:
        """As in StepPlan: tokens before every further row of a sequence, added up over these rows."""
        counts = self.counts.astype(np.int64)
        return int(((counts - 1) * (2 * self.context - counts)).sum()) // 2


def table_shapes(limits: DummyBatchLimits, rows_each: int) -> list[tuple[BatchShape, ...]]:
    """One group for each row count of the table, in their order: the step of that many rows, and steps for slopes.

    rows_each: 1 for passes, which have no further rows, so that only the slope over context is measured.
    """
    short, long = (min(each, limits.longest) for each in (SHORT_CONTEXT, LONG_CONTEXT))
    row_counts = [each for each in ROW_COUNTS if each <= limits.max_rows]
    groups = {rows: [BatchShape(rows=rows, rows_each=rows_each, context=short)] for rows in row_counts}
    for wanted, sequences, each in _SLOPES:
        if long < 2 * short or (rows_each == 1 and each > 1):
            continue
        count = min(sequences, limits.num_sequences(long), limits.max_rows // each)
        if count:
            group = groups[max(rows for rows in row_counts if rows <= wanted)]
            group += [BatchShape(rows=count * each, rows_each=each, context=context) for context in (short, long)]
    return [(*dict.fromkeys(group),) for group in groups.values()]


def fit_table(seconds: Mapping[BatchShape, float], groups: Sequence[tuple[BatchShape, ...]]) -> CostTable:
    """The table of measured seconds. groups: of table_shapes; those that were not measured are left out."""
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
    return CostTable.measured(net, kv_token_s=kv_token_s, kv_row_token_s=kv_row_token_s)
