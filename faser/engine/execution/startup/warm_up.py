"""Everything that a step may do with logits, done once before the first request comes.

Kernels that are compiled when they are first called are then there, workspaces have their size, and what a step
takes of a device's memory beside the model's forward can be measured (gpu_budget). Slots, drafts and probabilities
are made up; nobody sees what comes of them. Knows neither what kernels there are nor how they are compiled: it
asks those who ask for them in service, in the same way, so that they get the variants that requests will need. Not
yet run on a GPU.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from faser.config.speculation import SpeculationConfig
from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.drafter_registry import names_model
from faser.engine.execution.drafters.draft_samplers import (
    WINDOW,
    DraftRows,
    DraftSampler,
    ProbabilisticDraftSampler,
    SampleAndMatchDraftSampler,
)
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.state import SamplingState
from faser.engine.execution.sampling.token_samplers import DeviceTokenSampler
from faser.engine.execution.verifiers.factory import make_verifier
from faser.engine.execution.verifiers.verifier import DraftedRows
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.sampling_metadata import SamplingMetadata
from faser.types import MAX_LOGPROBS, SamplingParams

# All at once: whatever edits and cuts a request may ask for, and as many log probabilities.
_EVERYTHING = SamplingParams(
    temperature=0.9,
    min_p=0.01,
    top_k=5,
    top_p=0.9,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    presence_penalty=0.1,
    logit_bias=((0, 1.0),),
    allowed_token_ids=(0, 1, 2),
    stop_token_ids=(2,),
    min_tokens=4,
    logprobs=MAX_LOGPROBS,
)


class WarmUp:
    """backend: whose kernels, with the workspaces that they will have in service.

    logits: [R, V] float32, where the model leaves those of a step; overwritten. speculation: what the engine does
    with drafts. verifies, drafts: the model judges drafts, or makes them; both of layers that draft for the rest.
    """

    def __init__(
        self, backend: Backend, logits: Tensor, speculation: SpeculationConfig, *, verifies: bool, drafts: bool
    ) -> None:
        self._backend = backend
        self._logits = logits
        self._speculation = speculation
        self._guesses = drafts
        samples = _are_sampled(speculation)
        self._parts: list[Callable[[int], None]] = [self._choose_on_device]
        if verifies:
            self._parts.append(self._sample)
        if verifies and samples and speculation.rejection_sample_method != "synthetic":
            self._parts.append(self._judge)
        if drafts:
            self._parts.append(self._draft)
        if drafts and samples:
            self._parts.append(self._join)

    def __len__(self) -> int:
        """How often `play` calls done."""
        return len(self._parts)

    @torch.inference_mode()
    def play(self, num_sequences: int, done: Callable[[], None] = lambda: None) -> None:
        """Do everything once, for a step of so many sequences. done: called behind each part."""
        for part in self._parts:
            self._logits.zero_()
            part(num_sequences)
            done()

    @property
    def _width(self) -> int:
        return self._logits.shape[1]

    def _num_rows(self, num_sequences: int) -> int:
        """Rows of a step in which all sequences have the longest draft, as far as there is room for them."""
        drafts = 0 if self._speculation.policy == "off" else self._speculation.cap
        return min(num_sequences * (drafts + 1), len(self._logits))

    def _choose_on_device(self, _num_sequences: int) -> None:
        """What recordings end with. For one row: the runner, which is made later, has a workspace of its own."""
        capture, choice = self._backend.capture, self._backend.device_sampling_kernels(1, self._width)
        if capture is None or choice is None:
            return
        chooser = DeviceTokenSampler(choice, capture, self._backend.device, 1)
        for temperature in (0.0, 0.9):
            requests = _requests(temperature)
            chooser.take(self._logits[:1], requests).wait()
            if self._guesses:
                chooser.draft(self._logits[:1], requests, WINDOW).wait()

    def _sample(self, num_sequences: int) -> None:
        """Every row of a step with drafts asks for everything."""
        num_rows = self._num_rows(num_sequences)
        sampler = self._sampler(num_rows, _EVERYTHING)
        sampler.sample(self._logits[:num_rows], range(num_rows), [2] * num_rows)

    def _judge(self, num_sequences: int) -> None:
        """Drafts of all lengths for which kernels differ, the longest last: of all sequences."""
        sampler = self._sampler(num_sequences, SamplingParams(temperature=0.9, top_k=5, top_p=0.9))
        verifier = make_verifier(self._speculation, sampler, self._backend.rejection_kernels)
        for length in draft_lengths(self._speculation.cap):
            count = min(num_sequences, len(self._logits) // (length + 1))
            drafts = [DraftedRows(slot=slot, position=2, draft=(0,) * length) for slot in range(count)]
            size = (count * length, self._width)
            proposed = torch.zeros(size, dtype=torch.float64, device=self._logits.device)
            proposed[:, 0] = 1.0
            verifier.judge(self._logits[: count * (length + 1)], drafts, proposed.clone())

    def _draft(self, num_sequences: int) -> None:
        """A pass in which every sequence drafts a token."""
        state = SamplingState(num_sequences)
        choice = self._draft_choice(state)
        if choice is None:
            return
        for slot in range(num_sequences):
            state.start(_start(slot, SamplingParams(temperature=0.9, top_k=5, top_p=0.9)))
        at = np.full(num_sequences, 2, dtype=np.int64)
        rows = DraftRows(slots=np.arange(num_sequences), positions=at, draft_starts=at)
        choice.choose(self._logits[:num_sequences], rows)

    def _join(self, num_sequences: int) -> None:
        """Allocates the memory of draft probabilities as drafters/passes.py does: by pass, joined, and in order.

        What the last pass's were kept from is still there as well.
        """
        size, device = (num_sequences, self._width), self._logits.device
        passes = [torch.empty(size, dtype=torch.float64, device=device) for _ in range(self._speculation.cap + 1)]
        joined = torch.cat(passes[1:])
        joined.index_select(0, torch.arange(len(joined), device=device))

    def _draft_choice(self, state: SamplingState) -> DraftSampler | None:
        """Who chooses drafted tokens by more than the most likely one; None where nobody does."""
        match self._speculation.draft_sample_method:
            case "probabilistic":
                return ProbabilisticDraftSampler(state, kernels=self._backend.sampling_kernels)
            case "coupled":
                return SampleAndMatchDraftSampler(state, kernels=self._backend.sampling_kernels)
            case _:
                return None

    def _sampler(self, num_slots: int, sampling: SamplingParams) -> Sampler:
        backend = self._backend
        sampler = Sampler(
            num_slots,
            self._width,
            (),
            self._logits.device,
            backend.sampling_kernels,
            backend.logits_processor_kernels,
        )
        for slot in range(num_slots):
            sampler.start(_start(slot, sampling))
        return sampler


def _are_sampled(speculation: SpeculationConfig) -> bool:
    """Whether drafts come with what they were drawn from."""
    by_model = names_model(speculation) or (speculation.policy != "off" and speculation.method == "layer_skip")
    return by_model and speculation.draft_sample_method == "probabilistic"


def draft_lengths(cap: int) -> list[int]:
    """1, 3, 7, …, as far as cap, and cap itself: kernels are made for 2, 4, 8, … rows of a sequence."""
    return [*(2**i - 1 for i in range(1, cap.bit_length() + 1) if 2**i - 1 < cap), cap]


def _start(slot: int, sampling: SamplingParams) -> SequenceStart:
    return SequenceStart(slot=slot, sampling=sampling, seed=slot, prompt_len=1, token_ids=(0, 1))


def _requests(temperature: float) -> SamplingMetadata:
    """Of one row that asks for everything."""
    return SamplingMetadata(
        temperature=np.full(1, temperature, dtype=np.float32),
        min_p=np.full(1, 0.01),
        top_k=np.full(1, 5, dtype=np.int64),
        top_p=np.full(1, 0.9),
        seeds=np.ones(1, dtype=np.uint64),
        positions=np.ones(1, dtype=np.int64),
    )
