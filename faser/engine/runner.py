"""Runs a model over the rows of a step. Owns its KV cache and the hidden states of the last step."""

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
        self._hidden: torch.Tensor | None = None  # [R, H] after the layers of the last forward, for its rows

    @property
    def num_layers(self) -> int:
        return self._decoder.spec.num_layers

    @property
    def vocab_size(self) -> int:
        return self._decoder.spec.vocab_size

    @torch.inference_mode()
    def forward(self, batch: RowBatch, num_layers: int | None = None) -> None:
        """Run the first num_layers layers (None: all) over the rows; their keys and values enter the cache."""
        plan = self._backend.plan(batch.layout, self._block_size)
        hidden = self._decoder.embed(batch.token_ids)
        last = self.num_layers if num_layers is None else num_layers
        self._hidden = self._decoder.run_layers(hidden, 0, last, self._cache, plan)

    @torch.inference_mode()
    def logits(self, rows: Sequence[int] | NDArray[np.int64]) -> torch.Tensor:
        """Logits [len(rows), V] float32 of rows of the last forward; valid until the next call."""
        assert self._hidden is not None, "logits before forward"
        return self._decoder.logits(self._hidden[torch.as_tensor(rows)])
