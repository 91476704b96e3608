"""Sums of prompts that take several steps. Oracle: the mean of all their states at once.

A bug these tests have been seen to catch: a sum that survives the end of its sequence.
"""

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.contract.plan import SequenceRows, SequenceStart, StepRows
from faser.engine.execution.pooling import Pooler
from faser.engine.execution.runner.runner import Runner
from faser.types.pooling import Pooling, PoolingKind
from faser.types.sampling import SamplingParams


class StatesOfRows:
    """Gives rows of the states that the test sets."""

    def __init__(self) -> None:
        self.states = torch.zeros(0)

    def normed(self, rows: NDArray[np.int64]) -> Tensor:
        return self.states[torch.from_numpy(rows)]


def start(slot: int, length: int) -> SequenceStart:
    sampling = SamplingParams(max_tokens=0, pooling=Pooling(kind=PoolingKind.MEAN))
    return SequenceStart(slot=slot, sampling=sampling, seed=0, prompt_len=length, token_ids=(1,) * length)


def test_a_preempted_prompt_is_summed_from_its_beginning() -> None:
    runner = StatesOfRows()
    pooler = Pooler(cast(Runner, runner), max_logit_rows=4)
    states = torch.randn(9, 5, generator=torch.Generator().manual_seed(3))

    def step(begin: int, end: int) -> dict[int, bytes]:
        runner.states = states[begin:end]
        rows = StepRows.of(SequenceRows(slot=2, start=begin, token_ids=(1,) * (end - begin), samples=False))
        return pooler.of_step(rows, np.array([end - begin - 1]))

    pooler.start(start(2, 9))
    assert not step(0, 4)
    pooler.release(2)
    pooler.start(start(2, 9))
    assert not step(0, 3)
    assert not step(3, 8)
    found = np.frombuffer(step(8, 9)[0], np.float32)
    np.testing.assert_allclose(found, states.mean(dim=0).numpy(), rtol=1e-6)
    pooler.release(2)
    assert not step(0, 9)
