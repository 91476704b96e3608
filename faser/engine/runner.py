"""Runs the target model over the rows of a step. Owns the KV cache and the hidden states of the last step."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from faser.engine.batch import RowBatch
from faser.engine.models.decoder import Decoder
from faser.kernels.backend import Backend, KvCache, KvShape


class Runner:
    """One model on one backend.

    kv: the size of the cache, allocated here.
    """

    def __init__(self, decoder: Decoder, backend: Backend, kv: KvShape) -> None:
        self._decoder = decoder
        self._backend = backend
        self._block_size = kv.block_size
        self._cache: KvCache = backend.allocate_kv(kv)
        self._hidden: torch.Tensor | None = None  # [R, H] after the last layer, rows of the last forward

    @torch.inference_mode()
    def forward(self, batch: RowBatch) -> None:
        """Run all layers over the rows; their keys and values enter the cache."""
        plan = self._backend.plan(batch.layout, self._block_size)
        hidden = self._decoder.embed(batch.token_ids)
        self._hidden = self._decoder.run_layers(hidden, 0, self._decoder.spec.num_layers, self._cache, plan)

    @torch.inference_mode()
    def logits(self, rows: Sequence[int] | NDArray[np.int64]) -> torch.Tensor:
        """Logits [len(rows), V] float32 of rows of the last forward; valid until the next call."""
        assert self._hidden is not None, "logits before forward"
        return self._decoder.logits(self._hidden[torch.as_tensor(rows)])
