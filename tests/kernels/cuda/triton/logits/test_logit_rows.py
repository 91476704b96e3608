"""Edits by Triton give the bits of logits_processors/torch_kernels.py, and reach the device in one copy.

Bugs these tests have been seen to catch: presence without output, entries after the first block lost, negative
logits divided, float32 left at its end, a row taken for its number among the named ones, the last allowed token
not found, columns past the width written, parts of the copy one word off.
"""

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.sampling.logits_processors.torch_kernels import TorchLogitsProcessorKernels
from faser.engine.execution.sampling.sampler import Sampler
from faser.errors import EngineError
from faser.kernels.cuda.device import CudaDevice
from faser.kernels.cuda.triton.logits.logit_edits import TritonLogitsProcessorKernels
from faser.kernels.cuda.triton.logits.logit_rows import RowEntries, forbid
from faser.kernels.interface.sampling.logits_processor_kernels import (
    AllowOnlyEdit,
    BiasEdit,
    ForbidEdit,
    LogitPositions,
    LogitsEdit,
    LogitsProcessorKernels,
    MaskEdit,
    PenaltyEdit,
    RowsEdit,
)
from tests.engine.execution.sampling.test_sampler import EOS, PROMPT, VOCAB, random_sampling
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.cuda.triton.rows import DEVICE

ROWS = [0, 2, 3]
SIZES = [3, 300, 1]  # entries of each; one has more than a program
NUM_ROWS, WIDTH = 5, 1100


def by_triton(accelerator: FakeAccelerator | None = None) -> LogitsProcessorKernels:
    return TritonLogitsProcessorKernels(
        accelerator or (CudaDevice(torch.device(DEVICE)) if DEVICE == "cuda" else FakeAccelerator())
    )


def places(seed: int, sizes: list[int] = SIZES, *, width: int = WIDTH) -> LogitPositions:
    """Ascending in a row, from the first token to the last one."""
    rng = np.random.default_rng(seed)
    token_ids = [np.sort(rng.permutation(width)[:size]) for size in sizes]
    for each in token_ids:
        each[-1:] = width - 1
    token_ids[0][:1] = 0
    return LogitPositions(
        rows=np.array(ROWS[: len(sizes)]), sizes=np.array(sizes), token_ids=np.concatenate(token_ids)
    )


def penalties(seed: int, *, extreme: bool = False) -> PenaltyEdit:
    """Some tokens were generated, some stand in the prompt only."""
    rng = np.random.default_rng(seed)
    at = places(seed)
    return PenaltyEdit(
        at=at,
        output_counts=rng.integers(-2, 4, len(at.token_ids)).clip(0).astype(np.float64),
        repetition=np.array([1e-300, 1e300, 2.0]) if extreme else np.array([0.4, 1.3, 2.0]),
        frequency=np.array([-1.3, 0.0, 0.7]),
        presence=np.array([0.5, -0.7, 0.0]),
    )


def bias(seed: int) -> BiasEdit:
    at = places(seed)
    return BiasEdit(
        at=at, values=np.random.default_rng(seed).standard_normal(len(at.token_ids)).astype(np.float32)
    )


def masks(seed: int, rows: list[int], *, words: int = 18) -> MaskEdit:
    """Random bits, a word of ones and one of zeros; more bits than a row has logits."""
    bits = np.random.default_rng(seed).integers(-(2**63), 2**63, (len(rows), words), dtype=np.int64)
    bits[:, 1], bits[:, 2] = -1, 0
    return MaskEdit(rows=np.array(rows), words=bits)


EDITS: dict[str, list[LogitsEdit]] = {
    "bias": [bias(0)],
    "penalties": [penalties(1)],
    "extreme penalties": [penalties(2, extreme=True)],
    "allowed": [AllowOnlyEdit(at=places(3))],
    "one allowed": [AllowOnlyEdit(at=places(4, [1]))],
    "none allowed": [
        AllowOnlyEdit(at=LogitPositions(rows=np.array([1]), sizes=np.array([0]), token_ids=np.zeros(0, np.int64)))
    ],
    "forbidden": [ForbidEdit(at=places(5))],
    "masked": [masks(9, [0, 2, 4])],
    "one masked": [masks(10, [3], words=40)],
    "all": [
        bias(6),
        penalties(7),
        RowsEdit(rows=np.array([1, 3]), function=lambda logits: logits.clamp(max=4.0)),
        AllowOnlyEdit(at=places(8)),
        ForbidEdit(at=places(8, [1, 2])),
        masks(11, [2, 3]),
    ],
}


def same(edits: list[LogitsEdit], ours: LogitsProcessorKernels) -> None:
    logits = 5 * torch.randn(NUM_ROWS, WIDTH + 8, generator=torch.Generator().manual_seed(1))
    logits[0, 0] = -torch.inf
    found, wanted = logits.to(DEVICE, copy=True), logits.clone()
    ours.apply(found[:, :WIDTH], edits)
    TorchLogitsProcessorKernels().apply(wanted[:, :WIDTH], edits)
    assert not torch.equal(wanted, logits)
    assert torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize("name", EDITS)
def test_logits_are_edited_as_the_processors_do(name: str) -> None:
    """Rows of a wider tensor; rows that are not named and what is beside them keep their bits."""
    same(EDITS[name], by_triton())


@pytest.mark.skipif(DEVICE != "cpu", reason="counts copies of the emulated device")
@pytest.mark.parametrize("name", EDITS)
def test_all_edits_of_a_step_are_one_copy_from_pinned_memory(name: str) -> None:
    accelerator = FakeAccelerator()
    same(EDITS[name], by_triton(accelerator))
    accelerator.wait()
    assert (accelerator.uploads, accelerator.pinned_bytes > 0) == (1, True)


@pytest.mark.skipif(DEVICE != "cpu", reason="counts copies of the emulated device")
def test_no_edits_are_no_work() -> None:
    accelerator = FakeAccelerator()
    by_triton(accelerator).apply(torch.zeros(1, 4), [])
    assert accelerator.uploads == 0


def test_more_entries_than_tokens_are_refused() -> None:
    number = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    at = RowEntries(rows=number[:1], row_start=number, token_ids=number[:0], max_entries=401)
    with pytest.raises(EngineError, match="max_entries is 401; a row has from 0 to 400"):
        forbid(torch.zeros(1, 400, device=DEVICE), at)


@pytest.mark.parametrize("seed", range(3))
def test_a_sampler_prepares_the_same_rows_with_it(seed: int) -> None:
    """Any mixture of requests, draft tokens before a row, and rows that a mask would make look sound."""
    rng = random.Random(seed)
    samplers = [Sampler(8, VOCAB, EOS, "cpu"), Sampler(8, VOCAB, EOS, DEVICE, processor_kernels=by_triton())]
    for slot in range(8):
        sampling = random_sampling(rng)
        for sampler in samplers:
            sampler.start(
                SequenceStart(
                    slot=slot, sampling=sampling, seed=slot, prompt_len=len(PROMPT), token_ids=(*PROMPT, 6, 7, 6)
                )
            )
    slots = [slot for slot in range(8) for _ in range(2)]
    positions = [7 + i % 2 for i in range(16)]
    drafts = [(9,) * (i % 2) for i in range(16)]
    logits = 3 * torch.randn(16, VOCAB, generator=torch.Generator().manual_seed(seed))
    for row in rng.sample(range(16), 4):
        logits[row, rng.randrange(VOCAB)] = rng.choice([torch.nan, torch.inf])

    ours, theirs = (
        each.prepare(on.to(DEVICE, copy=True) if each is samplers[1] else on, slots, positions, drafts)
        for each, on in zip(samplers[::-1], (logits, logits.clone()), strict=True)
    )

    assert ours.errors == theirs.errors
    assert len(ours.errors) >= 4
    assert ours.best.tolist() == theirs.best.tolist()
    assert equal_numbers(ours.logits.cpu(), theirs.logits)


def equal_numbers(one: Tensor, other: Tensor) -> bool:
    """Where both are no numbers they are equal."""
    return torch.equal(one.nan_to_num(123.0, 1e38, -1e38), other.nan_to_num(123.0, 1e38, -1e38))
