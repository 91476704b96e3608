"""Times forwards of one runner over dummy sequences, while the KV cache is still empty.

Steps look like verification: a few sequences with several rows each. Decides only how often each size is timed.
"""

import logging
import statistics
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from faser.engine.contract.step_times import CostTable
from faser.engine.execution.overlap.partition import PendingResult
from faser.engine.execution.runner.batch import RowBatch
from faser.engine.execution.runner.runner import Runner
from faser.kernels.interface.shapes import RowLayout
from faser.types import ProgressCallback

_log = logging.getLogger("faser.engine")

STAGE = "measuring step times"
ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
ROWS_EACH = 4  # rows of each sequence in a step that verifies
_REPEATS, _LEAST_REPEATS, _MOST_REPEATS = 7, 5, 31
_LONG_ENOUGH_S = 0.25  # per row count: short steps vary more and cost little, so they are timed more often
_SHORT_CONTEXT, _LONG_CONTEXT = 64, 1024


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


@dataclass(slots=True)
class ProfileProgress:
    """Progress over all row counts of all roles."""

    progress: ProgressCallback
    total: int
    done: int = field(default=0)

    def advance(self) -> None:
        self.done = min(self.done + 1, self.total)
        self.progress(STAGE, self.done, self.total)

    def finish(self) -> None:
        self.progress(STAGE, self.total, self.total)


class StepProfiler:
    """Times forwards of one runner. rows_each: rows per sequence: several in verification, one in a pass."""

    def __init__(
        self,
        runner: Runner,
        limits: DummyBatchLimits,
        *,
        num_layers: int | None = None,
        rows_each: int = ROWS_EACH,
    ) -> None:
        self._runner = runner
        self._limits = limits
        self._num_layers = num_layers
        self._rows_each = rows_each

    def table(self, budget_s: float, progress: ProfileProgress) -> CostTable:
        """Step times by row count, measured within about budget_s seconds.

        Small row counts come first: they are the most frequent, and large ones can be extrapolated. Then each
        round times every count once, so that a busy moment of the machine slows all of them alike.
        """
        ends_s = time.perf_counter() + budget_s
        short, long = min(_SHORT_CONTEXT, self._longest()), min(_LONG_CONTEXT, self._longest())
        batches = (
            [self.dummy_batch(1, long)] if long >= 2 * short else []
        )  # for the slope over context, with the first row count
        num_slopes = len(batches)
        times: list[list[float]] = [[self._warm_s(batch)] for batch in batches]
        row_counts = [each for each in ROW_COUNTS if each <= self._limits.max_rows]
        for rows in row_counts:
            round_s = sum(each for (each,) in times)
            if len(times) > num_slopes and time.perf_counter() + _LEAST_REPEATS * round_s > ends_s:
                measured = row_counts[len(times) - num_slopes - 1]
                _log.info(
                    "step times: measured up to %d rows within %.0f s, extrapolated above", measured, budget_s
                )
                break
            batches.append(self.dummy_batch(rows, short))
            times.append([self._warm_s(batches[-1])])
            progress.advance()
        wanted = [min(max(int(_LONG_ENOUGH_S / each[0]), _REPEATS), _MOST_REPEATS) for each in times]
        for done in range(1, max(wanted)):
            if done >= _LEAST_REPEATS and time.perf_counter() > ends_s:
                break
            for batch, each, often in zip(batches, times, wanted, strict=True):
                if done < often:
                    each.append(self.time_s(batch))
        medians = [statistics.median(each) for each in times]
        kv_token_s = max(medians[0] - medians[1], 0.0) / (long - short) if num_slopes else 0.0
        read = [kv_token_s * int(batch.layout.seq_len.sum()) for batch in batches]
        net = [max(median - kv_s, 1e-9) for median, kv_s in zip(medians, read, strict=True)]
        return CostTable.measured(dict(zip(row_counts, net[num_slopes:], strict=False)), kv_token_s=kv_token_s)

    def run_largest(self) -> None:
        self.time_s(self.dummy_batch(self._limits.max_rows, min(_SHORT_CONTEXT, self._longest())))

    def _longest(self) -> int:
        """Most tokens of one dummy sequence."""
        return max(1, min(self._limits.max_len, self._limits.num_blocks * self._limits.block_size))

    def dummy_batch(self, rows: int, context: int) -> RowBatch:
        """A step of this many rows, rows_each per sequence, that ends at `context` tokens of each sequence.

        Sequences may share blocks and overwrite each other's keys and values, which has no effect on times.
        """
        each = min(self._rows_each, context)
        counts = np.full(-(-rows // each), each, dtype=np.int32)
        counts[-1] = rows - each * (len(counts) - 1)
        starts = context - counts
        query_start = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        positions = np.arange(rows, dtype=np.int32) + np.repeat(starts - query_start[:-1], counts)
        return RowBatch(
            token_ids=torch.from_numpy(np.arange(rows, dtype=np.int64) % self._runner.vocab_size),
            layout=RowLayout(
                query_start=torch.from_numpy(query_start),
                seq_len=torch.full((len(counts),), context, dtype=torch.int32),
                positions=torch.from_numpy(positions.astype(np.int32)),
                block_table=torch.from_numpy(self._blocks(len(counts), context)),
            ),
            last_rows=query_start[1:].astype(np.int64) - 1,
        )

    def _blocks(self, num_sequences: int, context: int) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
        """[num_sequences, blocks of a context]. Sequences share blocks only where there are too few."""
        width = -(-context // self._limits.block_size)
        numbers = np.arange(num_sequences * width, dtype=np.int32) % self._limits.num_blocks
        return numbers.reshape(num_sequences, width)

    def _warm_s(self, batch: RowBatch) -> float:
        """Seconds of a second run: the first one meets cold memory."""
        self.time_s(batch)
        return self.time_s(batch)

    def time_s(self, batch: RowBatch) -> float:
        began_s = time.perf_counter()
        self.enqueue(batch).wait()
        return time.perf_counter() - began_s

    def enqueue(self, batch: RowBatch) -> PendingResult[None]:
        """A forward, the logits of all its rows and their greedy tokens, as in verification."""
        self._runner.forward(batch, self._num_layers)
        num_rows, most = len(batch.token_ids), self._limits.max_logit_rows
        token_ids = [
            self._runner.logits(np.arange(first, min(first + most, num_rows))).argmax(dim=-1)
            for first in range(0, num_rows, most)
        ]

        def wait() -> None:
            for each in token_ids:
                each.tolist()

        return PendingResult(wait)
