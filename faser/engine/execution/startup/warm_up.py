"""Warm-up: every kernel is prepared and the largest step is run, before the first request.

A warm-up does once what a step may do with logits: kernels are then compiled, and workspaces have their final
size. It calls the samplers and verifiers of the engine, not kernels, so each kernel is compiled in the variants
that requests will need. Together with the largest forward it shows what a GPU has left for keys and values. Slots,
drafts and probabilities are dummies, and the results are dropped.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from faser.config.declaration import show_bytes
from faser.config.engine import EngineConfig
from faser.config.speculation import SpeculationConfig
from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.drafting.samplers import (
    DraftRows,
    DraftSampler,
    ProbabilisticDraftSampler,
    SampleAndMatchDraftSampler,
)
from faser.engine.execution.overlap.lanes import DeviceLanes
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.parameters import SamplingState
from faser.engine.execution.sampling.rows import DraftLayout
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.tokens import DeviceTokenSampler
from faser.engine.execution.sampling.verify import SampleAndMatch, make_verifier
from faser.engine.execution.startup.files import ModelRole
from faser.engine.execution.startup.memory import MemoryBudget, cache_shapes, state_shape
from faser.engine.execution.startup.models import LoadedHead, LoadedModel, expected_graph_bytes, reserve_workspace
from faser.engine.execution.startup.step_profiler import DummyBatchLimits, StepProfiler
from faser.errors import ConfigError
from faser.kernels.cuda.device import DeviceMemory
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.sampling import SamplingMetadata
from faser.types.engine import ProgressCallback
from faser.types.sampling import MAX_LOGPROBS, SamplingParams

STAGE = "preparing kernels"

# Every logits processor, every truncation and as many log probabilities as a request may have.
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
    bad_words=((1,),),
    stop_token_ids=(2,),
    min_tokens=4,
    logprobs=MAX_LOGPROBS,
)


class WarmUp:
    """backend: the engine's own, so that its kernels' workspaces are kept.

    logits: [R, V] float32, the model's buffer for the logits of a step; overwritten. verifies, drafts: whether the
    model verifies drafts, and whether it makes them.
    """

    def __init__(
        self, backend: Backend, logits: Tensor, speculation: SpeculationConfig, *, verifies: bool, drafts: bool
    ) -> None:
        self._backend = backend
        self._logits = logits
        self._speculation = speculation
        self._drafts = drafts
        has_draft_probs = _has_draft_probs(speculation)
        self._parts: list[Callable[[int], None]] = [self._sample_on_device]
        if verifies:
            self._parts.append(self._sample)
        if verifies and has_draft_probs and speculation.rejection_sample_method != "synthetic":
            self._parts.append(self._verify)
        if drafts:
            self._parts.append(self._draft)
        if drafts and has_draft_probs:
            self._parts.append(self._join_draft_probs)

    def __len__(self) -> int:
        """Number of parts."""
        return len(self._parts)

    @torch.inference_mode()
    def run(self, num_sequences: int, done: Callable[[], None] = lambda: None) -> None:
        """Run every part once, for a step of num_sequences sequences. done: called after each part."""
        for part in self._parts:
            self._logits.zero_()
            part(num_sequences)
            done()

    @property
    def _width(self) -> int:
        return self._logits.shape[1]

    def _num_rows(self, num_sequences: int) -> int:
        """Rows of a step in which all sequences have the longest draft, as far as they fit."""
        drafts = 0 if self._speculation.policy == "off" else self._speculation.cap
        return min(num_sequences * (drafts + 1), len(self._logits))

    def _sample_on_device(self, _num_sequences: int) -> None:
        """The sampling at the end of CUDA graphs. For one row: the runner will have a workspace of its own."""
        capture, kernels = self._backend.graph_capture, self._backend.device_sampling_kernels(1, self._width)
        if capture is None or kernels is None:
            return
        sampler = DeviceTokenSampler(kernels, capture, self._backend.device, 1)
        for temperature in (0.0, 0.9):
            requests = _requests(temperature)
            sampler.take(self._logits[:1], requests).wait()
            if self._drafts:
                sampler.draft(self._logits[:1], requests).wait()

    def _sample(self, num_sequences: int) -> None:
        """Every row of a step with drafts uses every sampling parameter."""
        num_rows = self._num_rows(num_sequences)
        sampler = self._sampler(num_rows, _EVERYTHING)
        rows = DraftLayout.plain(np.arange(num_rows), np.full(num_rows, 2))
        SampleAndMatch(sampler).verify(self._logits[:num_rows], rows, None)

    def _verify(self, num_sequences: int) -> None:
        """Verifies the longest drafts."""
        sampler = self._sampler(num_sequences, SamplingParams(temperature=0.9, top_k=5, top_p=0.9))
        verifier = make_verifier(self._speculation, sampler)
        length = self._speculation.cap
        count = min(num_sequences, len(self._logits) // (length + 1))
        drafted = np.zeros(count * length, dtype=np.int64)
        drafts = DraftLayout.of(np.arange(count), np.full(count, 2), np.full(count, length), drafted)
        size = (count * length, self._width)
        proposed = torch.zeros(size, dtype=torch.float64, device=self._logits.device)
        proposed[:, 0] = 1.0
        verifier.verify(self._logits[: count * (length + 1)], drafts, proposed.clone())

    def _draft(self, num_sequences: int) -> None:
        """One pass in which every sequence drafts a token."""
        state = SamplingState(num_sequences)
        sampler = self._draft_sampler(state)
        if sampler is None:
            return
        for slot in range(num_sequences):
            state.start(_start(slot, SamplingParams(temperature=0.9, top_k=5, top_p=0.9)))
        at = np.full(num_sequences, 2, dtype=np.int64)
        rows = DraftRows(slots=np.arange(num_sequences), positions=at, draft_starts=at)
        sampler.choose(self._logits[:num_sequences], rows)

    def _join_draft_probs(self, num_sequences: int) -> None:
        """Takes the memory of a draft's probabilities as execution/drafting/loop.py does, and computes nothing.

        One tensor per pass, all of them joined, and the joined one reordered; the last pass's input is alive too.
        """
        size, device = (num_sequences, self._width), self._logits.device
        passes = [torch.empty(size, dtype=torch.float64, device=device) for _ in range(self._speculation.cap + 1)]
        joined = torch.cat(passes[1:])
        joined.index_select(0, torch.arange(len(joined), device=device))

    def _draft_sampler(self, state: SamplingState) -> DraftSampler | None:
        """The sampler of draft tokens; None where drafts are greedy."""
        match self._speculation.draft_sample_method:
            case "probabilistic":
                return ProbabilisticDraftSampler(state, kernels=self._backend.sampling_kernels)
            case "coupled":
                return SampleAndMatchDraftSampler(state, kernels=self._backend.sampling_kernels)
            case _:
                return None

    def _sampler(self, num_slots: int, sampling: SamplingParams) -> Sampler:
        sampler = Sampler(num_slots, self._width, (), self._backend.sampling_kernels)
        for slot in range(num_slots):
            sampler.start(_start(slot, sampling))
        return sampler


def make_warm_up(config: EngineConfig, model: LoadedModel) -> WarmUp:
    is_target = model.files.role is ModelRole.TARGET
    return WarmUp(
        model.backend,
        model.decoder.logit_rows,
        config.speculation,
        verifies=is_target,
        drafts=not is_target,
    )


def prepare_kernels(config: EngineConfig, models: Sequence[LoadedModel], progress: ProgressCallback) -> None:
    """Compile every kernel that sampling and verification may need. Call it after loading all models."""
    warm_ups = [make_warm_up(config, each) for each in models]
    total, num_done = sum(map(len, warm_ups)), 0

    def done() -> None:
        nonlocal num_done
        num_done += 1
        progress(STAGE, num_done, total)

    progress(STAGE, 0, total)
    for each in warm_ups:
        each.run(1, done)


def profile_memory(
    config: EngineConfig,
    models: Sequence[LoadedModel],
    memory: DeviceMemory,
    free_at_start_bytes: int,
    lanes: DeviceLanes,
    heads: Sequence[LoadedHead] = (),
) -> MemoryBudget:
    """Measure the memory budget by running the largest steps. lanes: those that compute at the same time.

    heads: their largest steps are the target's, in buffers that are there; what graphs take comes on top.
    """

    def step() -> None:
        for each in models:
            reserve_workspace(config, each)
            _largest_step(config, each)
            make_warm_up(config, each).run(config.max_num_seqs)

    def num_lanes(model: LoadedModel) -> int:
        return len(lanes.verify if model.files.role is ModelRole.TARGET else lanes.draft)

    return measure_budget(
        config,
        memory,
        free_at_start_bytes,
        step,
        graph_bytes=sum(expected_graph_bytes(config, each, num_lanes(each)) for each in models)
        + sum(expected_graph_bytes(config, each) for each in heads),
        # The step makes attention's workspaces.
        workspaces_bytes=sum(_sampling_bytes(each) for each in models)
        + sum(_sampling_bytes(each) for each in heads if each.drafts_on_device),
    )


def measure_budget(
    config: EngineConfig,
    memory: DeviceMemory,
    free_at_start_bytes: int,
    step: Callable[[], None],
    *,
    graph_bytes: int,
    workspaces_bytes: int,
) -> MemoryBudget:
    """Run the largest step, and divide what the device has besides it.

    Call it after loading all models and before making the KV caches. free_at_start_bytes: memory.free_bytes()
    before loading. step: for each model one forward of max_num_batched_tokens rows with as many logits as a step
    can have, over a minimal KV cache. Workspaces that it leaves count as loaded. graph_bytes, workspaces_bytes:
    what will be taken later.

    Raises ConfigError where the step does not fit.
    """
    memory.release()
    memory.reset_peak()
    try:
        step()
    except torch.OutOfMemoryError as error:
        rows = config.max_num_batched_tokens
        raise ConfigError(
            f"--max-num-batched-tokens is {rows}; {memory.name} has no room for a step of {rows} rows in "
            f"addition to the models, which take {show_bytes(memory.held_bytes())}; "
            f"{show_bytes(free_at_start_bytes)} were free"
        ) from error
    peak = memory.peak_bytes()
    memory.release()
    held = memory.held_bytes()
    return MemoryBudget(
        device=memory.name,
        total_bytes=memory.total_bytes,
        share=config.gpu_memory_utilization,
        free_bytes=free_at_start_bytes,
        # The driver's count includes kernels, which bypass torch's allocator. It is too small where another
        # process has freed memory since.
        loaded_bytes=max(held, free_at_start_bytes - memory.free_bytes()),
        step_bytes=max(0, peak - held),
        step_rows=config.max_num_batched_tokens,
        graph_bytes=graph_bytes,
        workspaces_bytes=workspaces_bytes,
    )


def _sampling_bytes(model: LoadedModel | LoadedHead) -> int:
    """Return the bytes that a runner's sampling kernels keep between steps. A head has the target's vocabulary."""
    vocab_size = (model.target if isinstance(model, LoadedHead) else model).files.spec.vocab_size
    return model.files.max_logit_rows * vocab_size * _SAMPLING_BYTES // 1024


def _largest_step(config: EngineConfig, model: LoadedModel) -> None:
    """Over a KV cache of a few blocks, which all sequences of the step share."""
    (kv,) = cache_shapes(config, [model.files], _FEW_BLOCKS)
    limits = DummyBatchLimits(
        num_blocks=kv.num_blocks,
        block_size=kv.block_size,
        max_len=model.files.max_positions,
        max_rows=config.max_num_batched_tokens,
        max_logit_rows=model.files.max_logit_rows,
    )
    runner = Runner(model.decoder, model.backend, kv, states=state_shape(config, model.files))
    StepProfiler(runner, limits).run_largest()


def _has_draft_probs(speculation: SpeculationConfig) -> bool:
    """Return whether drafts come with the distributions that they were drawn from."""
    return speculation.needs_passes and speculation.draft_sample_method == "probabilistic"


def _start(slot: int, sampling: SamplingParams) -> SequenceStart:
    return SequenceStart(slot=slot, sampling=sampling, seed=slot, prompt_len=1, token_ids=(0, 1))


def _requests(temperature: float) -> SamplingMetadata:
    """One row that uses every sampling parameter."""
    return SamplingMetadata(
        temperature=np.full(1, temperature, dtype=np.float32),
        min_p=np.full(1, 0.01),
        top_k=np.full(1, 5, dtype=np.int64),
        top_p=np.full(1, 0.9),
        seeds=np.ones(1, dtype=np.uint64),
        positions=np.ones(1, dtype=np.int64),
    )


_FEW_BLOCKS = 8  # of the cache that the largest step is run over
_SAMPLING_BYTES = 160  # of a row and 1,024 tokens of the vocabulary: sums by chunk and digit
