"""The order of the logits processors, and one that has no kernel: what a new sampling parameter takes."""

from collections.abc import Collection, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.sampling.logits_processors.processor import LogitsProcessor, ProcessedRows
from faser.engine.execution.sampling.logits_processors.registry import make_logits_processors
from faser.engine.execution.sampling.sampler import Sampler
from faser.kernels.interface.sampling.logits_processor_kernels import (
    AllowOnlyEdit,
    BiasEdit,
    ForbidEdit,
    PenaltyEdit,
    RowsEdit,
)
from faser.types import SamplingParams

WIDTH = 40
EVERYTHING = SamplingParams(
    logit_bias=((3, 1.0),),
    presence_penalty=0.5,
    allowed_token_ids=(1, 3),
    bad_words=((2,),),
    min_tokens=2,
    stop_token_ids=(1,),
)


def start(slot: int, sampling: SamplingParams) -> SequenceStart:
    return SequenceStart(slot=slot, sampling=sampling, seed=slot, prompt_len=2, token_ids=(5, 6))


class TopNSigma:
    """Removes tokens whose logit is more than one standard deviation below the largest, in even slots."""

    reads_output = False

    def __init__(self) -> None:
        self._slots: set[int] = set()

    @property
    def slots(self) -> Collection[int]:
        return self._slots

    def start(self, start: SequenceStart) -> None:
        if start.slot % 2 == 0:
            self._slots.add(start.slot)

    def accept(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        raise AssertionError(f"its edits do not depend on {token_ids} of slots {slots}")

    def release(self, slot: int) -> None:
        self._slots.discard(slot)

    def edit(self, rows: ProcessedRows) -> RowsEdit | None:
        asking = rows.of(self._slots)
        return RowsEdit(rows=np.array(asking), function=top_n_sigma) if asking else None


def top_n_sigma(logits: Tensor) -> Tensor:
    limit = logits.amax(-1, keepdim=True) - logits.std(-1, keepdim=True)
    return logits.masked_fill(logits < limit, -torch.inf)


def test_bias_and_penalties_come_before_masks() -> None:
    processors = make_logits_processors(2, WIDTH, (2,))
    rows = ProcessedRows([0, 1], [2, 2], None)
    for processor in processors:
        processor.start(start(0, SamplingParams()))
        assert not processor.slots
        processor.start(start(1, EVERYTHING))
        assert list(processor.slots) == [1]

    edits = [processor.edit(rows) for processor in processors]

    assert [type(each) for each in edits] == [BiasEdit, PenaltyEdit, AllowOnlyEdit, ForbidEdit, ForbidEdit]
    for processor in processors:
        processor.release(1)
        assert processor.edit(rows) is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_without_a_kernel_edits_the_rows_that_ask_for_it(temperature: float) -> None:
    """Oracle: a sampler without it, of logits that were edited before."""
    processor: LogitsProcessor = TopNSigma()
    ours, plain = Sampler(4, WIDTH, (), "cpu", processors=[processor]), Sampler(4, WIDTH, (), "cpu")
    for slot in range(4):
        for sampler in (ours, plain):
            sampler.start(start(slot, SamplingParams(temperature=temperature)))
    logits = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    edited = logits.clone()
    edited[[0, 2]] = top_n_sigma(logits[[0, 2]])

    for position in range(2, 30):
        found = ours.sample(logits.clone(), range(4), [position] * 4)
        assert found == plain.sample(edited.clone(), range(4), [position] * 4)
        ours.accept(range(4), [row.token_id for row in found])
    prepared = ours.prepare(logits.clone(), range(4), [2] * 4, None)

    assert torch.equal(prepared.logits, edited)
    assert not ours.needs_only_logits([1, 2])
    assert ours.needs_only_logits([1, 3])
    ours.release(2)
    assert ours.needs_only_logits([1, 3])
    ours.check_invariants()
