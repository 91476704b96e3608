"""Steps of a runner with nothing around them: a forward of a made-up layout, and the choice of a token a row.

One is launched before the one before it is read, as an engine with steps in flight does it, so that times are the
device's as long as the host is faster. Writes into blocks of the cache: no sequence may be running, and what the
prefix cache holds of them is void afterwards.
"""

import numpy as np
import torch

from benchmarks.gpu.common.timing import DeviceClock
from faser.engine.execution.runner.batch import RowBatch
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.tokens import PendingTokens
from faser.kernels.interface.sampling import SamplingMetadata
from faser.kernels.interface.shapes import RowLayout

_WARM = 3


def batch_of(
    *, sequences: int, rows_each: int, context: int, num_blocks: int, block_size: int, vocab_size: int
) -> RowBatch:
    """Sequences with context tokens in the cache, the last rows_each of them computed in this step.

    As long as there are enough blocks, no block is in two sequences.
    """
    rows = sequences * rows_each
    starts = np.arange(sequences + 1, dtype=np.int32) * rows_each
    width = -(-context // block_size)
    blocks = np.arange(sequences * width, dtype=np.int32) % num_blocks
    positions = np.tile(np.arange(context - rows_each, context, dtype=np.int32), sequences)
    token_ids = np.arange(rows, dtype=np.int64) * 7919 % vocab_size
    return RowBatch(
        token_ids=torch.from_numpy(token_ids),
        layout=RowLayout(
            query_start=torch.from_numpy(starts),
            seq_len=torch.full((sequences,), context, dtype=torch.int32),
            positions=torch.from_numpy(positions),
            block_table=torch.from_numpy(blocks.reshape(sequences, width)),
        ),
        last_rows=starts[1:].astype(np.int64) - 1,
    )


def greedy_requests(positions: np.ndarray[tuple[int], np.dtype[np.int64]]) -> SamplingMetadata:
    count = len(positions)
    return SamplingMetadata(
        temperature=np.zeros(count, np.float32),
        min_p=np.zeros(count),
        top_k=np.zeros(count, np.int64),
        top_p=np.ones(count),
        seeds=np.arange(count, dtype=np.uint64),
        positions=positions,
    )


def steps_s(runner: Runner, batch: RowBatch, clock: DeviceClock, repeats: int) -> list[float]:
    """Device seconds of each of so many steps, one behind the other."""
    rows = np.arange(len(batch.token_ids), dtype=np.int64)
    requests = greedy_requests(batch.layout.positions.numpy().astype(np.int64) + 1)
    marks = []
    pending: PendingTokens | None = None
    for _ in range(_WARM + repeats):
        marks.append(clock.mark())
        runner.forward(batch)
        behind = runner.sample(rows, requests)
        if pending is not None:
            pending.wait()
        pending = behind
    marks.append(clock.mark())
    return clock.between_s(marks)[_WARM:]
