"""Runs a model over the rows of a step. Owns the model's KV cache and the hidden states of the last forward.

The caller gets logits of rows, or tokens that are being sampled from them.

A forward may pause between two layers: `begin`, `advance` to a layer, take `logits` of the rows as if the model
ended there, `compact` the rows, `advance` to the end. The remaining rows get the same bits as in a forward of all
rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.execution.runner.batch import BlockTable, ContinuedDrafts, RowBatch
from faser.engine.execution.runner.kv_memory import RunnerMemory
from faser.engine.execution.runner.model import RunnableModel
from faser.engine.execution.runner.state_cache import NoStates, StateCache
from faser.engine.execution.sampling.tokens import LOGITS_ONLY, PendingTokens, TokenSampler
from faser.kernels.interface.adapters import AdapterRows
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.graph_capture import Readback, StagingBuffer
from faser.kernels.interface.kv_cache import KvParts, KvShape
from faser.kernels.interface.mixers import StateShape, StateStep
from faser.kernels.interface.sampling import SamplingKernels, SamplingMetadata
from faser.kernels.interface.shapes import AttentionPlan, KvCache, RowLayout
from faser.optional import or_else

_Done = TypeVar("_Done")
_LEAST_NUMBERS = 64  # of a staging buffer; sizes are powers of 2


class CachedRunner:
    """A runner's backend, and the cache that it owns there."""

    def __init__(self, backend: Backend, kv: KvShape) -> None:
        self._backend = backend
        self._block_size = kv.block_size
        self._cache: KvCache = backend.allocate_kv(kv)

    @property
    def cache(self) -> KvCache:
        """Keys and values of the model's layers."""
        return self._cache

    @property
    def sampling_kernels(self) -> SamplingKernels | None:
        """Kernels that sample from this model's logits, on the threads that run the model; None: no kernels."""
        return self._backend.sampling_kernels

    @property
    def experts_read(self) -> int:
        """Count the experts' weights that the backend has read so far."""
        return self._backend.experts_read

    def row_edges(self, most: int) -> tuple[int, ...]:
        """Return the row counts below `most` that fill tiles of the backend's products."""
        return self._backend.row_edges(most)

    def repeatable_memory(self) -> Sequence[Tensor] | None:
        """Return the cache, row i of each tensor block i; None where bits of a row depend on its batch."""
        if self._backend.name != "native":
            return None
        parts: KvParts = self._cache
        return parts.parts()


class Runner(CachedRunner):
    """One model on one backend.

    kv: size of the KV cache, which the runner allocates. token_sampler: used by this runner alone; without one it
    gives logits only. states: size of the states of sequences; None: the model has none.
    """

    # Of the last forward, from `begin` on:
    _batch: RowBatch
    _plan: AttentionPlan
    _hidden: Tensor  # [R, H] after the layers below _next_layer
    _next_layer: int
    _state_step: StateStep | None  # where states go on, in a model that has any
    _adapted: AdapterRows | None  # which adapters its rows have

    def __init__(
        self,
        decoder: RunnableModel,
        backend: Backend,
        kv: KvShape,
        token_sampler: TokenSampler = LOGITS_ONLY,
        states: StateShape | None = None,
    ) -> None:
        assert kv.heads == decoder.spec.kv_heads, (kv.heads, decoder.spec.kv_heads)
        super().__init__(backend, kv)
        self._decoder = decoder
        self._token_sampler = token_sampler
        self._states = StateCache(backend, states) if states else NoStates()
        self._row_numbers = StagedNumbers(backend)
        self._step_inputs = StagedNumbers(backend)

    @property
    def num_layers(self) -> int:
        return self._decoder.spec.num_layers

    @property
    def vocab_size(self) -> int:
        return self._decoder.spec.vocab_size

    @property
    def token_sampler(self) -> TokenSampler:
        return self._token_sampler

    @property
    def most_graph_rows(self) -> int | None:
        """Rows of the largest step that has a CUDA graph; None: the runner replays none."""
        return None

    def count_experts(self) -> Callable[[], int]:
        """Begin to count the experts whose weights are read: see Backend.count_experts."""
        return self._backend.count_experts()

    def forward(self, batch: RowBatch) -> None:
        """Run all layers over the rows; their keys and values enter the cache."""
        self.begin(batch)
        self.advance()

    @torch.inference_mode()
    def fill_cache(self, layout: RowLayout) -> None:
        """Store random keys and values where a forward of these rows would store its own. Runs no layer."""
        self._decoder.fill_cache(len(layout.positions), self._cache, self._backend.plan(layout, self._block_size))

    @torch.inference_mode()
    def begin(self, batch: RowBatch) -> None:
        """Start a forward: embed the rows, run no layer."""
        self._batch = batch
        self._plan = self._backend.plan(batch.layout, self._block_size)
        self._state_step = self._states.begin(batch.layout)
        self._adapted = self._decoder.adapter_rows(batch.layout)
        self._hidden = self._decoder.embed(self._token_ids(batch))
        self._next_layer = 0

    @torch.inference_mode()
    def advance(self, num_layers: int | None = None) -> None:
        """Run the following layers until the first num_layers layers have run; None: all layers."""
        last = or_else(num_layers, self.num_layers)
        assert self._next_layer <= last <= self.num_layers, f"no way from layer {self._next_layer} to {last}"
        self._hidden = self._decoder.run_layers(
            self._hidden,
            self._next_layer,
            last,
            self._cache,
            self._plan,
            captures=self._batch.captures,
            state_step=self._state_step,
            adapted=self._adapted,
        )
        self._next_layer = last

    @torch.inference_mode()
    def checksum(self) -> Tensor:
        """Return a checksum [1] int64 of the bits of the hidden states of the last forward."""
        return self._hidden.contiguous().view(torch.uint8).long().sum().reshape(1)

    @torch.inference_mode()
    def compact(self, counts: NDArray[np.int32]) -> RowBatch:
        """Drop rows from the forward: sequence s keeps its first counts[s] rows, at least one.

        Renumbers the rows; returns the compact batch. The following layers do not see the dropped rows: their
        positions count as not computed.
        """
        batch, kept = self._batch.compact(counts)
        if len(kept) < len(self._hidden):
            self._batch = batch
            self._plan = self._backend.plan(batch.layout, self._block_size)
            self._state_step = self._states.compact(batch.layout)
            self._adapted = self._decoder.adapter_rows(batch.layout)
            rows = self._on_device(kept)
            self._hidden = self._hidden[: len(kept)].copy_(self._hidden.index_select(0, rows))
            self._decoder.keep_rows(rows)
            if batch.captures:
                states = self._decoder.states
                states[: len(kept)].copy_(states.index_select(0, rows))
        return self._batch

    def _on_device(self, rows: NDArray[np.int64]) -> torch.Tensor:
        """Row numbers on the device of the hidden states, [N] int64, valid until the next call. Does not wait."""
        (found,) = self._row_numbers.send(rows)
        return found

    def _token_ids(self, batch: RowBatch) -> torch.Tensor:
        """Token ids [R] int64 on the device, tokens fed back included. Does not wait."""
        feedback, token_ids = batch.feedback, batch.token_ids.numpy()
        if feedback is None:
            (sent,) = self._step_inputs.send(token_ids)
            return sent
        sent, rows, sources = self._step_inputs.send(token_ids, feedback.rows, feedback.sources)
        return sent.index_put((rows,), feedback.tokens[sources].clamp_min(0))

    @torch.inference_mode()
    def save_state(self, slot: int, snapshot: int, num_tokens: int) -> None:
        """See StateCache.save. Between forwards."""
        self._states.save(slot, snapshot, num_tokens)

    @torch.inference_mode()
    def restore_state(self, slot: int, snapshot: int) -> None:
        """See StateCache.restore. Between forwards."""
        self._states.restore(slot, snapshot)

    def memory(self) -> RunnerMemory:
        """Return its blocks and snapshots as bytes. On a CPU."""
        cache: KvParts = self._cache
        kept = self._states.snapshots
        return RunnerMemory(cache.parts(), kept.parts(), save_state=self.save_state, set_tokens=kept.set_tokens)

    def states(self, num_rows: int) -> torch.Tensor:
        """Return the captured states [num_rows, K * H] of the last forward; the next one overwrites them."""
        return self._decoder.states[:num_rows]

    @torch.inference_mode()
    def logits(self, rows: Sequence[int] | NDArray[np.int64]) -> torch.Tensor:
        """Logits [len(rows), V] float32 of rows after the last layer that ran; valid until the next call."""
        return self._decoder.logits(
            self._hidden.index_select(0, self._on_device(np.asarray(rows, dtype=np.int64)))
        )

    @torch.inference_mode()
    def normed(self, rows: NDArray[np.int64]) -> torch.Tensor:
        """Return the states [len(rows), H] of rows behind the last layer and the norm before the head."""
        assert self._hidden is not None, "normed before forward"
        return self._decoder.normed(self._hidden.index_select(0, self._on_device(rows)))

    def sample(self, rows: NDArray[np.int64], requests: SamplingMetadata) -> PendingTokens:
        """Sample the token that follows each of these rows of the last forward."""
        return self.sample_from(self.logits(rows), requests)

    def sample_from(self, logits: torch.Tensor, requests: SamplingMetadata) -> PendingTokens:
        """Sample a token from each row of the last `logits`, which may have been edited in place."""
        return self._token_sampler.take(logits, requests)

    def read_back(self, values: Tensor) -> Readback:
        """Start the way of these values to the host; later work may overwrite them."""
        capture = self._backend.graph_capture
        return ReadyValues(values) if capture is None else capture.readback((values,))

    def sample_drafts(self, rows: NDArray[np.int64], requests: SamplingMetadata) -> PendingTokens:
        """Sample the draft token that follows each row, with its logit margin."""
        return self._token_sampler.draft(self.logits(rows), requests)

    def continue_drafts(self, _drafts: ContinuedDrafts, _table: BlockTable) -> bool:
        """Prepare passes behind the tokens that sample_drafts has sampled last; follow_on launches each of them.

        False: they are to be laid out, and run by forward.
        """
        return False

    def follow_on(self) -> PendingTokens:
        """Launch the next pass that continue_drafts has prepared, and sample its tokens."""
        raise AssertionError("continue_drafts has prepared no pass")


@dataclass(frozen=True, slots=True)
class ReadyValues:
    """Readback where nothing travels while the host does something else."""

    values: Tensor

    def wait(self) -> tuple[NDArray[Any], ...]:
        return (self.values.numpy(force=True),)


def with_experts_counted(
    runner: Runner, samples: Sequence[bool], forward: Callable[[], _Done]
) -> tuple[_Done, Callable[[], int]]:
    """Run a forward, and count the experts that it reads without a wait of its own.

    Returns what the forward returns, and a call that gives the number: after the wait for the forward's tokens it
    does not wait again. samples: whether each sequence gets a token; where none does, nothing is counted.
    """
    if not any(samples):
        return forward(), lambda: 0
    before = runner.count_experts()
    done = forward()
    after = runner.count_experts()
    return done, lambda: after() - before()


class StagedNumbers:
    """Sends whole numbers to the device for one eager step, through pinned memory where the device has it: a copy
    from other memory makes the host wait until the driver has read it.

    Each size has a staging buffer of its own, made at its first use.
    """

    def __init__(self, backend: Backend) -> None:
        self._device = backend.device
        self._capture = backend.graph_capture
        self._buffers: dict[int, StagingBuffer] = {}

    def send(self, *arrays: NDArray[np.int64]) -> list[Tensor]:
        """The arrays on the device, valid until the next call. Does not wait for the device."""
        if self._capture is None:
            return [torch.from_numpy(each).to(self._device) for each in arrays]
        ends = np.cumsum([len(each) for each in arrays]).tolist()
        capacity = max(_LEAST_NUMBERS, 1 << (ends[-1] - 1).bit_length() if ends[-1] else 0)
        buffer = self._buffers.get(capacity)
        if buffer is None:
            buffer = self._buffers[capacity] = self._capture.staging_buffer(capacity, torch.int64)
        np.concatenate(arrays, out=buffer.host()[: ends[-1]])
        buffer.send()
        starts = [0, *ends]
        return [buffer.device[start:end] for start, end in zip(starts, ends, strict=False)]
