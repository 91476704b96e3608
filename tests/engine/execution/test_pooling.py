"""Sums of prompts that take several steps, and vectors of steps in flight. Oracle: all states of a prompt at once.

Bugs these tests have been seen to catch: a sum that survives the end of its sequence; states that are gathered
when the vectors are asked for.
"""

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.contract.plan import SequenceRows, SequenceStart, StepRows
from faser.engine.execution.pooling import Pooler
from faser.engine.execution.runner.runner import ReadyValues, Runner
from faser.types.pooling import Pooling, PoolingKind
from faser.types.sampling import SamplingParams


class StatesOfRows:
    """Gives rows of the states that the test sets."""

    def __init__(self) -> None:
        self.states = torch.zeros(0)

    def normed(self, rows: NDArray[np.int64]) -> Tensor:
        return self.states[torch.from_numpy(rows)]

    def read_back(self, values: Tensor) -> ReadyValues:
        return ReadyValues(values)


def start(slot: int, length: int, kind: PoolingKind = PoolingKind.MEAN) -> SequenceStart:
    sampling = SamplingParams(max_tokens=0, pooling=Pooling(kind=kind))
    return SequenceStart(slot=slot, sampling=sampling, seed=0, prompt_len=length, token_ids=(1,) * length)


def test_vectors_are_read_before_the_next_forward_overwrites_their_states() -> None:
    """Steps launched ahead: what a step gives is asked for when the next one has begun."""
    runner = StatesOfRows()
    pooler = Pooler(cast(Runner, runner), max_logit_rows=4)
    states = runner.states = torch.randn(6, 5, generator=torch.Generator().manual_seed(4))
    wanted = [states[:4].mean(dim=0).numpy(), states[5].numpy().copy()]
    pooler.start(start(1, 4))
    pooler.start(start(3, 2, PoolingKind.LAST))
    one = SequenceRows(slot=1, start=0, token_ids=(1,) * 4, samples=False)
    other = SequenceRows(slot=3, start=0, token_ids=(1,) * 2, samples=False)

    vectors = pooler.of_step(StepRows.of(one, other), np.array([3, 5]))
    states.zero_()
    pooler.release(1)
    pooler.release(3)

    found = vectors()
    for at in range(2):
        np.testing.assert_allclose(np.frombuffer(found[at], np.float32), wanted[at], rtol=1e-6)


def test_a_preempted_prompt_is_summed_from_its_beginning() -> None:
    runner = StatesOfRows()
    pooler = Pooler(cast(Runner, runner), max_logit_rows=4)
    states = torch.randn(9, 5, generator=torch.Generator().manual_seed(3))

    def step(begin: int, end: int) -> dict[int, bytes]:
        runner.states = states[begin:end]
        rows = StepRows.of(SequenceRows(slot=2, start=begin, token_ids=(1,) * (end - begin), samples=False))
        return pooler.of_step(rows, np.array([end - begin - 1]))()

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
