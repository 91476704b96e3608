"""Kernels are prepared and the largest step is run, on the emulated device, with a model's real steps.

Bugs that these tests have caught: a warm-up of one sequence in place of the largest step, no warm-up at all, one
model left out.

Warm-up does what steps do, and takes at least the memory that they take.

Oracle: the memory that tensors really take while the parts of a step do their largest work one by one, on the
emulated device. Bugs these tests have been seen to catch: rows without drafts, drafts not joined, no verdicts.
"""

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from faser.config.engine import EngineConfig
from faser.config.speculation import SpeculationConfig
from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.drafting.loop import DraftInput, DraftProgress
from faser.engine.execution.drafting.samplers import DraftRows, ProbabilisticDraftSampler
from faser.engine.execution.overlap.lanes import DeviceLanes
from faser.engine.execution.sampling.kernels import TorchSamplingKernels
from faser.engine.execution.sampling.parameters import SamplingState
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.verify import make_verifier
from faser.engine.execution.startup.files import ModelRole, target_files
from faser.engine.execution.startup.models import LoadedModel
from faser.engine.execution.startup.warm_up import STAGE, WarmUp, prepare_kernels, profile_memory
from faser.kernels.cuda.flashinfer.backend import FlashInferBackend
from faser.kernels.interface.sampling import SamplingMetadata
from faser.types.arrays import Ints, Words
from faser.types.sampling import SamplingParams
from tests.engine.execution.runner.test_graph_runner import (
    BLOCK_SIZE,
    MAX_LOGIT_ROWS,
    WIDTH,
    Side,
    write_heads_of_64,
)
from tests.engine.execution.sampling.sampled import Drafted, layout
from tests.kernels.cuda.fake_graph import fake_backend
from tests.kernels.cuda.fake_memory import FakeMemory

SEQUENCES, DRAFTS = 3, 1
CONFIG = EngineConfig(
    device="cuda:0",
    backend="flashinfer",
    block_size=BLOCK_SIZE,
    max_num_seqs=SEQUENCES,
    max_num_batched_tokens=8,  # more would share blocks, to which the emulated kernel objects
    speculative_config={"method": "draft_model", "model": "m", "num_speculative_tokens": DRAFTS},
    speculative_policy="fixed",
)


class Counted(TorchSamplingKernels):
    """rows: the number of rows of each call."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def take(self, logits: Tensor, shaping: SamplingMetadata, noise: Words) -> Ints:
        self.rows.append(len(logits))
        return super().take(logits, shaping, noise)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_heads_of_64(tmp_path_factory.mktemp("heads-of-64"))


def loaded(checkpoint: Path, role: ModelRole) -> tuple[LoadedModel, Counted]:
    side, counted = Side(checkpoint), Counted()
    side.backend.sampling_kernels = counted
    files = replace(target_files(CONFIG, checkpoint), role=role)
    files = replace(files, dtype=side.decoder.dtype, kv_dtype=side.decoder.dtype, max_positions=BLOCK_SIZE * WIDTH)
    return LoadedModel(files=files, decoder=side.decoder, backend=side.backend), counted


def test_the_largest_step_samples_all_rows_of_sequences_and_drafts(checkpoint: Path) -> None:
    target, counted = loaded(checkpoint, ModelRole.TARGET)
    memory = FakeMemory(total_bytes=1 << 30)
    profile_memory(CONFIG, [target], memory, memory.free_bytes(), DeviceLanes())
    assert counted.rows == [SEQUENCES * (DRAFTS + 1)]
    assert max(counted.rows) <= MAX_LOGIT_ROWS


def test_kernels_of_every_model_are_prepared_and_each_part_is_reported(checkpoint: Path) -> None:
    (target, of_target), (draft, _) = (
        loaded(checkpoint, ModelRole.TARGET),
        loaded(checkpoint, ModelRole.DRAFT),
    )
    reports: list[tuple[str, int, int]] = []
    prepare_kernels(CONFIG, [target, draft], lambda *stage: reports.append(stage))
    assert of_target.rows == [DRAFTS + 1]
    assert reports == [(STAGE, done, 4) for done in range(5)]


VOCABULARY, SLOTS, CAP = 2000, 4, 3
SAMPLED = SpeculationConfig(
    policy="fixed", method="draft_model", num_speculative_tokens=CAP, draft_sample_method="probabilistic"
)
GIVEN = SLOTS * (CAP + 1) * VOCABULARY * 4  # bytes of a step's logits, which every work below makes for itself


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
    return torch.from_numpy(np.random.default_rng(3).standard_normal((SLOTS * (CAP + 1), VOCABULARY))).float()


def start(slot: int, sampling: SamplingParams) -> SequenceStart:
    return SequenceStart(slot=slot, sampling=sampling, seed=slot, prompt_len=2, token_ids=(5, 6))


def scored(backend: FlashInferBackend) -> None:
    """A step with drafts in which every request has log probabilities."""
    sampler = Sampler(SLOTS, VOCABULARY, (), backend.sampling_kernels)
    for slot in range(SLOTS):
        sampler.start(start(slot, SamplingParams(logprobs=20, presence_penalty=0.2)))
    drafts = layout([Drafted(slot=slot, position=2, draft=(7,) * CAP) for slot in range(SLOTS)])
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
    sampler = Sampler(SLOTS, VOCABULARY, (), backend.sampling_kernels)
    for slot in range(SLOTS):
        sampler.start(start(slot, SamplingParams()))
    probs = torch.full((SLOTS * CAP, VOCABULARY), 1 / VOCABULARY, dtype=torch.float64)
    drafts = layout([Drafted(slot=slot, position=2, draft=(7,) * CAP) for slot in range(SLOTS)])
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
