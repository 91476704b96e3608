"""Warm-up does what steps do, and takes at least the memory that they take.

Oracle: the memory that tensors really take while the parts of a step do their largest work one by one, on the
emulated device. Bugs these tests have been seen to catch: rows without drafts, drafts not joined, no verdicts.
"""

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from faser.config.speculation import SpeculationConfig
from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.drafters.draft_samplers import DraftRows, ProbabilisticDraftSampler
from faser.engine.execution.drafters.passes import DraftInput, DraftProgress
from faser.engine.execution.sampling.parameters import SamplingState
from faser.engine.execution.sampling.rows import DraftedRows
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.verify import make_verifier
from faser.engine.execution.startup.warm_up import WarmUp
from faser.kernels.cuda.flashinfer.backend import FlashInferBackend
from faser.types import SamplingParams
from tests.kernels.cuda.fake_graph import fake_backend

WIDTH, SLOTS, CAP = 2000, 4, 3
SAMPLED = SpeculationConfig(
    policy="fixed", method="layer_skip", num_speculative_tokens=CAP, draft_sample_method="probabilistic"
)
GIVEN = SLOTS * (CAP + 1) * WIDTH * 4  # bytes of a step's logits, which every work below makes for itself


class Memory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """peak: the most bytes that new tensors had at the same time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inside = {_address(each) for each in args if isinstance(each, torch.Tensor)}
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, torch.Tensor) and _address(each) not in inside | self._known:
                self._count(each.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        self._known.add(address)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, address, size)

    def _forget(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.now -= size


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def peak_of(work: Callable[[], object]) -> int:
    work()  # makes the workspaces
    with Memory() as memory:
        work()
    peak: int = memory.peak
    return peak


def new_logits() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(3).standard_normal((SLOTS * (CAP + 1), WIDTH))).float()


def start(slot: int, sampling: SamplingParams) -> SequenceStart:
    return SequenceStart(slot=slot, sampling=sampling, seed=slot, prompt_len=2, token_ids=(5, 6))


def scored(backend: FlashInferBackend) -> None:
    """A step with drafts in which every request has log probabilities."""
    sampler = Sampler(SLOTS, WIDTH, (), backend.sampling_kernels)
    for slot in range(SLOTS):
        sampler.start(start(slot, SamplingParams(logprobs=20, presence_penalty=0.2)))
    drafts = [DraftedRows(slot=slot, position=2, draft=(7,) * CAP) for slot in range(SLOTS)]
    verifier = make_verifier(SpeculationConfig(policy="fixed", method="ngram"), sampler)
    verifier.verify(new_logits(), drafts, None)


def drafted(backend: FlashInferBackend) -> torch.Tensor:
    """The longest drafts, with the distributions that they were drawn from."""
    state, logits = SamplingState(SLOTS), new_logits()
    choice = ProbabilisticDraftSampler(state, kernels=backend.sampling_kernels)
    for slot in range(SLOTS):
        state.start(start(slot, SamplingParams()))
    progress = DraftProgress(
        [DraftInput(slot=slot, start=2, token_ids=(3,), max_tokens=CAP) for slot in range(SLOTS)]
    )
    going = np.arange(SLOTS)
    while len(going):
        rows = DraftRows(slots=going, positions=going + 3, draft_starts=going + 3)
        going = progress.take(going, choice.choose(logits[: len(going)], rows), None)
    probs = progress.batch(passes=CAP).probs
    assert probs is not None
    return probs


def verified(backend: FlashInferBackend, speculation: SpeculationConfig) -> None:
    """Sampled drafts; the drafter keeps all their probabilities while kept ones are verified."""
    sampler = Sampler(SLOTS, WIDTH, (), backend.sampling_kernels)
    for slot in range(SLOTS):
        sampler.start(start(slot, SamplingParams()))
    probs = torch.full((SLOTS * CAP, WIDTH), 1 / WIDTH, dtype=torch.float64)
    drafts = [DraftedRows(slot=slot, position=2, draft=(7,) * CAP) for slot in range(SLOTS)]
    verifier = make_verifier(speculation, sampler)
    verifier.verify(new_logits(), drafts, probs[torch.arange(len(probs))])


def played(speculation: SpeculationConfig, *, verifies: bool, drafts: bool) -> int:
    """Bytes besides the logits, which are an argument of WarmUp."""
    warm_up = WarmUp(fake_backend(), new_logits(), speculation, verifies=verifies, drafts=drafts)
    return peak_of(lambda: warm_up.run(SLOTS))


def test_no_draft_takes_more_memory() -> None:
    backend = fake_backend()
    assert peak_of(lambda: drafted(backend)) - GIVEN <= played(SAMPLED, verifies=False, drafts=True)


@pytest.mark.parametrize("method", ["standard", "block"])
def test_no_verification_takes_more_memory(method: str) -> None:
    backend, speculation = fake_backend(), replace(SAMPLED, rejection_sample_method=method)
    found = played(speculation, verifies=True, drafts=False)
    assert peak_of(lambda: verified(backend, speculation)) - GIVEN <= found


def test_no_log_probabilities_take_more_memory() -> None:
    backend = fake_backend()
    text = SpeculationConfig(policy="fixed", method="ngram", num_speculative_tokens=CAP)
    assert peak_of(lambda: scored(backend)) - GIVEN <= played(text, verifies=True, drafts=False)


def test_every_part_is_reported_when_it_is_done() -> None:
    reports: list[None] = []
    warm_up = WarmUp(fake_backend(), new_logits(), SAMPLED, verifies=True, drafts=True)
    warm_up.run(1, lambda: reports.append(None))
    assert len(reports) == len(warm_up) == 5


def test_a_draft_model_verifies_nothing_and_a_target_without_drafts_drafts_nothing() -> None:
    off = SpeculationConfig(policy="off")
    assert len(WarmUp(fake_backend(), new_logits(), off, verifies=True, drafts=False)) == 2
    model = replace(SAMPLED, method="draft_model", model="some/model")
    assert len(WarmUp(fake_backend(), new_logits(), model, verifies=False, drafts=True)) == 3
    assert len(WarmUp(fake_backend(), new_logits(), model, verifies=True, drafts=False)) == 3
