"""The verifier that judges by kernels says what the one by tensors says, and asks the device once.

Bugs these tests have been seen to catch: seeds and positions changed places, the longest draft one short, no room
for more rows, min_p instead of its logarithm, a temperature for greedy rows, the last accepted token lost, a bad
row taken for a sound one, one that a mask hides among them.
"""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.verifiers.device_rejection import DeviceRejection
from faser.engine.execution.verifiers.rejection import Rejection
from faser.engine.execution.verifiers.verifier import AcceptanceResult, DraftedRows
from faser.kernels.cuda.device import Accelerator, CudaDevice
from faser.kernels.cuda.triton.sampling.host_rejection import TritonRejectionKernels
from faser.kernels.interface.sampling.rejection_kernels import RejectionKernels
from faser.types import SamplingParams
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.cuda.fake_graph import FakeRejectionKernels
from tests.kernels.cuda.triton.rows import DEVICE

WIDTH, EOS = 40, (2,)
PLAIN = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=1.3, min_p=0.05),
]
EDITED = [
    SamplingParams(temperature=1.0, presence_penalty=1.0, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, logit_bias=((3, 4.0),)),
    SamplingParams(temperature=0.8, allowed_token_ids=tuple(range(3, 30)), logprobs=2),
]
TRUNCATED = [SamplingParams(temperature=1.0, top_k=5), SamplingParams(temperature=1.0, top_p=0.8)]


def accelerator() -> Accelerator:
    return CudaDevice(torch.device(DEVICE)) if DEVICE == "cuda" else FakeAccelerator()


class Pair:
    """Two samplers with the same requests, one for each verifier."""

    def __init__(self, params: list[SamplingParams], kernels: RejectionKernels) -> None:
        self._samplers = [Sampler(len(params), WIDTH, EOS, device) for device in ("cpu", DEVICE)]
        for slot, sampling in enumerate(params):
            for sampler in self._samplers:
                start = SequenceStart(slot=slot, sampling=sampling, seed=slot + 9, prompt_len=2, token_ids=(5, 6))
                sampler.start(start)
        self._plain = Rejection(self._samplers[0])
        self._ours = DeviceRejection(self._samplers[1], kernels, Rejection(self._samplers[1]))

    def judge(
        self, logits: Tensor, sequences: list[DraftedRows], probs: Tensor | None
    ) -> tuple[list[AcceptanceResult], list[AcceptanceResult]]:
        on_device = None if probs is None else probs.to(DEVICE)
        ours = self._ours.judge(logits.to(DEVICE, copy=True), sequences, on_device)
        return ours, self._plain.judge(logits.clone(), sequences, probs)


def step(num_drafts: list[int], seed: int, *, alike: float) -> tuple[Tensor, list[DraftedRows], Tensor]:
    """Logits, and drafts drawn from probabilities that are in part the target's own."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(2 * rng.standard_normal((sum(num_drafts) + len(num_drafts), WIDTH))).float()
    sequences, probs, row = [], [], 0
    for slot, num in enumerate(num_drafts):
        draft = []
        for i in range(num):
            line = alike * logits[row + i].double().softmax(-1).numpy() + (1 - alike) * rng.dirichlet(
                np.ones(WIDTH)
            )
            probs.append(line / line.sum())
            draft.append(int(rng.choice(WIDTH, p=probs[-1])))
        sequences.append(DraftedRows(slot=slot, position=2 + slot, draft=tuple(draft)))
        row += num + 1
    return logits, sequences, torch.from_numpy(np.array(probs).reshape(-1, WIDTH))


@pytest.mark.parametrize(
    "make",
    [lambda: TritonRejectionKernels(accelerator(), block=16), lambda: FakeRejectionKernels(FakeAccelerator())],
)
@pytest.mark.parametrize("alike", [0.3, 1.0])
@pytest.mark.parametrize("params", [PLAIN, EDITED], ids=["plain", "edited"])
def test_verdicts_are_those_of_the_verifier_by_tensors(
    params: list[SamplingParams], alike: float, make: Callable[[], RejectionKernels]
) -> None:
    """Steps of growing size on one workspace; rows that are no numbers; log probabilities."""
    rng, pair = random.Random(1), Pair(params, make())
    for seed, num_drafts in enumerate(([1, 0, 2], [3, 2, 0], [1, 4, 1])):
        logits, sequences, probs = step(num_drafts, seed, alike=alike)
        if seed == 2:
            logits[rng.randrange(2), 31] = torch.nan  # where a mask hides it
            logits[6, 3] = torch.inf
        ours, theirs = pair.judge(logits, sequences, probs)
        assert ours == theirs


@pytest.mark.slow
def test_truncated_requests_have_the_same_verdicts() -> None:
    pair = Pair(TRUNCATED, TritonRejectionKernels(accelerator(), block=16))
    ours, theirs = pair.judge(*step([2, 2], 5, alike=0.9))
    assert ours == theirs


def test_drafts_without_probabilities_are_point_masses() -> None:
    kernels = FakeRejectionKernels(FakeAccelerator())
    logits, sequences, _ = step([2, 0, 1], 3, alike=1.0)
    ours, theirs = Pair(PLAIN, kernels).judge(logits, sequences, None)
    assert ours == theirs
    assert kernels.calls == 0


@pytest.mark.skipif(DEVICE != "cpu", reason="counts copies of the emulated device")
def test_what_the_device_is_told_of_a_step_is_one_copy_from_pinned_memory() -> None:
    device = FakeAccelerator()
    for num_drafts in ([1, 0, 2], [1, 1, 1]):
        Pair(PLAIN, TritonRejectionKernels(device, block=16)).judge(*step(num_drafts, 4, alike=1.0))
    device.wait()
    assert device.uploads == 2
