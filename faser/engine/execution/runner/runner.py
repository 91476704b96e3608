"""Runs a model over the rows of a step. Owns its KV cache and the hidden states of the last step.

What follows a row comes as logits, for whoever wants to do more with them, or as a token that is being chosen.

A forward may stop between two layers: begin, advance to a layer, look at what the rows would say there, let some
of them leave, advance to the end. The rows that stay get the bits they would have got with all the others.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.runner.batch import RowBatch
from faser.engine.execution.sampling.token_samplers import PendingTokens, TokenSampler
from faser.kernels.interface.backend import AttentionPlan, Backend, KvCache, KvShape
from faser.kernels.interface.graph_capture import StagingBuffer
from faser.kernels.interface.sampling_kernels import SamplingKernels
from faser.kernels.interface.sampling_metadata import SamplingMetadata


class Runner:
    """One model on one backend.

    kv: the size of the cache, allocated here. chooser: of this runner alone; None: only logits are wanted of it.
    """

    def __init__(
        self, decoder: Decoder, backend: Backend, kv: KvShape, chooser: TokenSampler | None = None
    ) -> None:
        self._decoder = decoder
        self._backend = backend
        self._chooser = chooser
        self._block_size = kv.block_size
        self._cache: KvCache = backend.allocate_kv(kv)
        self._hidden: torch.Tensor | None = None  # [R, H] after the layers that the rows have been through
        self._batch: RowBatch | None = None
        self._plan: AttentionPlan = None
        self._next_layer = 0
        self._staying: StagingBuffer | None = None  # row numbers on a device; made when rows first leave there

    @property
    def num_layers(self) -> int:
        return self._decoder.spec.num_layers

    @property
    def vocab_size(self) -> int:
        return self._decoder.spec.vocab_size

    @property
    def sampling_kernels(self) -> SamplingKernels | None:
        """Kernels that choose from this model's logits, on the threads that the model runs on; None: none do."""
        return self._backend.sampling_kernels

    def forward(self, batch: RowBatch, num_layers: int | None = None) -> None:
        """Run the first num_layers layers (None: all) over the rows; their keys and values enter the cache."""
        self.begin(batch)
        self.advance(num_layers)

    @torch.inference_mode()
    def begin(self, batch: RowBatch) -> None:
        """Start a forward: the rows have been through no layer."""
        self._batch = batch
        self._plan = self._backend.plan(batch.layout, self._block_size)
        self._hidden = self._decoder.embed(_inputs(batch, self._backend.device))
        self._next_layer = 0

    @torch.inference_mode()
    def advance(self, num_layers: int | None = None) -> None:
        """Run on until the rows have been through the first num_layers layers; None: through all."""
        assert self._hidden is not None, "advance before begin"
        last = self.num_layers if num_layers is None else num_layers
        assert self._next_layer <= last <= self.num_layers, f"no way from layer {self._next_layer} to {last}"
        self._hidden = self._decoder.run_layers(self._hidden, self._next_layer, last, self._cache, self._plan)
        self._next_layer = last

    @torch.inference_mode()
    def narrow(self, counts: NDArray[np.int32]) -> RowBatch:
        """Let rows leave the forward: counts[s] rows of sequence s stay, its first ones, and at least one.

        Rows are numbered anew; returns the batch of those that stay. Layers to come know nothing of the others:
        their positions count as not computed.
        """
        assert self._batch is not None, "narrow before begin"
        assert self._hidden is not None, "narrow before begin"
        batch, staying = self._batch.narrowed(counts)
        if len(staying) < len(self._hidden):
            self._batch = batch
            self._plan = self._backend.plan(batch.layout, self._block_size)
            stayed = self._hidden.index_select(0, self._at(staying))
            self._hidden = self._hidden[: len(staying)].copy_(stayed)
        return self._batch

    def _at(self, rows: NDArray[np.int64]) -> torch.Tensor:
        """Row numbers where the hidden states are, [N] int64, valid until the next call. Nobody waits for them."""
        capture = self._backend.capture
        if capture is None:
            return torch.from_numpy(rows).to(self._backend.device)
        if self._staying is None:
            self._staying = capture.stage(len(self._decoder.hidden), torch.int64)
        self._staying.host()[: len(rows)] = rows
        self._staying.send()
        return self._staying.device[: len(rows)]

    @torch.inference_mode()
    def preview(self, rows: NDArray[np.int64], token_ids: torch.Tensor) -> torch.Tensor:
        """What rows would score some tokens if the layers they have been through were all: [N, M] float32.

        rows: [N]; token_ids: [N, M] int64, of each row. Changes nothing.
        """
        assert self._hidden is not None, "preview before begin"
        return self._decoder.scores(self._hidden[torch.from_numpy(rows)], token_ids)

    @torch.inference_mode()
    def logits(self, rows: Sequence[int] | NDArray[np.int64]) -> torch.Tensor:
        """Logits [len(rows), V] float32 of rows of the last forward; valid until the next call."""
        assert self._hidden is not None, "logits before forward"
        return self._decoder.logits(self._hidden.index_select(0, self._at(np.asarray(rows, dtype=np.int64))))

    def choose(self, rows: NDArray[np.int64], requests: SamplingMetadata) -> PendingTokens:
        """The tokens that follow rows of the last forward, as their requests want them."""
        assert self._chooser is not None, "this runner only gives logits"
        return self._chooser.take(self.logits(rows), requests)

    def guess(self, rows: NDArray[np.int64], requests: SamplingMetadata, window: float) -> PendingTokens:
        """Drafted tokens that follow rows of the last forward, and their leads. window: see SamplingKernels."""
        assert self._chooser is not None, "this runner only gives logits"
        return self._chooser.draft(self.logits(rows), requests, window)


def _inputs(batch: RowBatch, device: torch.device) -> torch.Tensor:
    """[R] int64 on the device, what is fed included."""
    feed = batch.feed
    token_ids = batch.token_ids.to(device)
    if feed is None:
        return token_ids
    rows, sources = (torch.from_numpy(each).to(device) for each in (feed.rows, feed.sources))
    return token_ids.index_put((rows,), feed.pending.tokens[sources].clamp_min(0))
