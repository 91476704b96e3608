"""Check `replays`: a step by its CUDA graph and the same step kernel by kernel, at exactly a graph's size.

With few tokens in the cache attention has one piece and one tile whatever it was planned for, so every bit is
the same. With more of them pieces may be cut otherwise, and sums are rounded in another order: then the error is
bounded.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.checks.models import relative_error
from benchmarks.gpu.common.bare import batch_of
from benchmarks.gpu.common.record import Json
from faser.engine.execution.runner.batch import RowBatch
from faser.engine.execution.runner.graph_runner import GraphRunner
from faser.engine.execution.runner.runner import Runner
from faser.types import ModelInfo

_FEW = 12  # tokens of context, with those of the step: less than a tile of any size
_MOST_ERROR = 5e-2  # a wrong number makes it about 1


def replayed(runner: Runner, info: ModelInfo, shapes: Sequence[tuple[int, int]], context: int) -> Json:
    """Logits of steps of (sequences, rows of each). context: the longer one. No sequence may be running."""
    assert isinstance(runner, GraphRunner), "the engine was built without CUDA graphs"
    found, ok = {}, True
    for sequences, rows_each in shapes:
        for tokens in (_FEW, context):
            step = _batch(info, sequences, rows_each, tokens)
            runner.forward(_batch(info, sequences, tokens, tokens))
            replay, eager = _logits(runner, step, GraphRunner), _logits(runner, step, Runner)
            graph_rows, others = runner.rows_replayed(step), int((replay != eager).sum())
            error = relative_error(replay, eager)
            row = {"graph_rows": graph_rows, "other_bits": others, "relative_error": error}
            found[f"{sequences} x {rows_each}, {tokens} tokens"] = row
            ok = ok and graph_rows == step.num_rows and error < _MOST_ERROR
            ok = ok and (tokens > _FEW or not others)
    return {"ok": ok, "found": found}


def _logits(runner: GraphRunner, step: RowBatch, way: type[Runner]) -> Tensor:
    """[R, V] of all rows of a step, as many at a time as there are sequences. way: whose methods compute it."""
    way.forward(runner, step)
    rows, at_once = np.arange(step.num_rows), len(step.last_rows)
    return torch.cat([way.logits(runner, rows[at : at + at_once]).clone() for at in range(0, len(rows), at_once)])


def _batch(info: ModelInfo, sequences: int, rows_each: int, context: int) -> RowBatch:
    return batch_of(
        sequences=sequences,
        rows_each=rows_each,
        context=context,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        vocab_size=info.vocab_size,
    )
