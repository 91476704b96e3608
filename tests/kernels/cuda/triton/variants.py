"""A program: which variants of kernels are asked for by a rehearsal, and which by requests after it. Prints JSON.

Triton's own key of every launch, as it would look it up on an H200: by types, alignment, values and sizes. Nothing
is compiled and no kernel runs, so it needs no GPU, and tokens are whatever was in memory. Run without
TRITON_INTERPRET, so in a process of its own. Arguments: tokens of the vocabulary, from 33 up; the longest draft.
"""

import json
import sys
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from faser.config.speculation import SpeculationConfig
from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.drafting.samplers import (
    DraftRows,
    ProbabilisticDraftSampler,
    SampleAndMatchDraftSampler,
)
from faser.engine.execution.sampling.parameters import SamplingState
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.tokens import DeviceTokenSampler
from faser.engine.execution.sampling.verify import SampleAndMatch, make_verifier
from faser.engine.execution.startup.warm_up import WarmUp
from faser.kernels.cuda.flashinfer.backend import FlashInferBackend
from faser.kernels.cuda.flashinfer.device_kernels import triton_kernels
from faser.kernels.interface.sampling import SamplingMetadata
from faser.types.sampling import SamplingParams
from tests.engine.execution.sampling.sampled import Drafted, layout
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.cuda.flashinfer.fake_flashinfer import FakeFlashInfer

SLOTS = 7
ASKED = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.0, top_k=16),
    SamplingParams(temperature=1.0, top_p=0.5),
    SamplingParams(temperature=1.0, min_p=0.1, top_k=1, top_p=0.9),
    SamplingParams(presence_penalty=0.5),
    SamplingParams(logit_bias=tuple((i, 1.0) for i in range(16)), logprobs=3),
    SamplingParams(allowed_token_ids=tuple(range(1)), min_tokens=5, stop_token_ids=(5,)),
    SamplingParams(allowed_token_ids=tuple(range(33)), repetition_penalty=1.2, logprobs=0),
)


class Nowhere:
    """A driver of Triton's for a GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def collect() -> set[str]:
    """The variants that will have been asked for, from now on. Nothing is launched."""
    found: set[str] = set()

    def asked(*, key: str, fn: Any, **_: Any) -> bool:
        found.add(f"{fn.name} {key}")
        return True

    triton.runtime.driver.set_active(Nowhere())
    knobs.runtime.jit_cache_hook = asked
    return found


def first_tokens(fixed_probs: torch.Tensor, _arrivals: torch.Tensor, _ids: object = None) -> torch.Tensor:
    """In place of `draw`: probabilities that no kernel has computed may be infinite."""
    return torch.zeros(len(fixed_probs), dtype=torch.int64)


class Requested:
    """What requests make of the same logits, backend and settings."""

    def __init__(self, backend: FlashInferBackend, logits: torch.Tensor, speculation: SpeculationConfig) -> None:
        self._backend = backend
        self._logits = logits
        self._speculation = speculation
        self._random = np.random.default_rng(0)

    def sampled(self) -> None:
        for sampling in ASKED:
            for count in (1, 2, SLOTS):
                self._plain(self._sampler(sampling), [3 + slot for slot in range(count)])
        mixed = Sampler(
            len(ASKED),
            self._logits.shape[1],
            (1,),
            self._backend.sampling_kernels,
        )
        for slot, sampling in enumerate(ASKED):
            mixed.start(_start(slot, sampling, 17))
        self._plain(mixed, [20] * len(ASKED))

    def _plain(self, sampler: Sampler, positions: list[int]) -> None:
        rows = layout([Drafted(slot, position) for slot, position in enumerate(positions)])
        SampleAndMatch(sampler).verify(self._logits[: rows.num_rows], rows, None)

    def verified(self) -> None:
        for sampling in ASKED:
            sampler = self._sampler(sampling)
            verifier = make_verifier(self._speculation, sampler)
            for count in (1, 3, SLOTS):
                for longest in range(1, self._speculation.cap + 1):
                    lengths = [longest, *self._random.integers(0, longest + 1, count - 1).tolist()]
                    drafts = layout([Drafted(i, 4, (1,) * n) for i, n in enumerate(lengths)])
                    probs = torch.zeros(sum(lengths), self._logits.shape[1], dtype=torch.float64)
                    self._logits.fill_(1.0)
                    verifier.verify(self._logits[: sum(lengths) + count], drafts, probs)

    def drafted(self) -> None:
        state = SamplingState(SLOTS)
        for slot in range(SLOTS):
            state.start(_start(slot, ASKED[slot], 3))
        for choice in (
            ProbabilisticDraftSampler(state, kernels=self._backend.sampling_kernels),
            SampleAndMatchDraftSampler(state, kernels=self._backend.sampling_kernels),
        ):
            for slots in (np.arange(1, 2), np.arange(3), np.arange(SLOTS)):
                rows = DraftRows(slots=slots, positions=slots + 4, draft_starts=slots + 4)
                choice.choose(self._logits[: len(slots)], rows)

    def chosen_by_a_runner(self, max_rows: int) -> None:
        """Eagerly, as in a step that fits no CUDA graph."""
        choice = self._backend.device_sampling_kernels(max_rows, self._logits.shape[1])
        chooser = DeviceTokenSampler(choice, self._backend.graph_capture, torch.device("cpu"), max_rows)
        for sampling in ASKED:
            for count in (1, max_rows):
                requests = SamplingMetadata(
                    temperature=np.full(count, sampling.temperature, dtype=np.float32),
                    min_p=np.full(count, sampling.min_p),
                    top_k=np.full(count, sampling.top_k),
                    top_p=np.full(count, sampling.top_p),
                    seeds=np.arange(count, dtype=np.uint64),
                    positions=np.arange(count),
                )
                chooser.take(self._logits[:count], requests)
                chooser.draft(self._logits[:count], requests)

    def _sampler(self, sampling: SamplingParams) -> Sampler:
        backend = self._backend
        sampler = Sampler(SLOTS, self._logits.shape[1], (1,), backend.sampling_kernels)
        for slot in range(SLOTS):
            sampler.start(_start(slot, sampling, 2 + slot))
        return sampler


def _start(slot: int, sampling: SamplingParams, prompt_len: int) -> SequenceStart:
    prompt = tuple(range(prompt_len))
    return SequenceStart(slot=slot, sampling=sampling, seed=slot, prompt_len=prompt_len, token_ids=prompt)


@patch("faser.engine.execution.sampling.rejection.draw", first_tokens)
@patch("faser.engine.execution.drafting.samplers.draw", first_tokens)
def main(width: int, cap: int) -> None:
    device = FakeAccelerator()
    backend = FlashInferBackend(device, FakeFlashInfer(device), triton_kernels(torch.device("cpu")))
    speculation = SpeculationConfig(
        policy="fixed",
        method="draft_model",
        num_speculative_tokens=cap,
        draft_sample_method="probabilistic",
    )
    logits = torch.ones(SLOTS * (cap + 1), width)  # also as probabilities: kernels that are not run write none
    rehearsed = collect()
    for drafts in (speculation, SpeculationConfig(policy="fixed", method="draft_model")):
        WarmUp(backend, logits, drafts, verifies=True, drafts=True).run(1)
    asked = collect()
    requested = Requested(backend, logits, speculation)
    requested.sampled()
    requested.verified()
    requested.drafted()
    for max_rows in (5, 16):
        requested.chosen_by_a_runner(max_rows)
    json.dump({"rehearsed": sorted(rehearsed), "asked": sorted(asked)}, sys.stdout)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
