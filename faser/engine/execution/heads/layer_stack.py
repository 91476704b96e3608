"""The decoder layers of a head: from the queries, keys and values of the first one to the output of the last."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from faser.engine.checkpoints.heads.head_spec import HeadSpec
from faser.engine.execution.models.decoder import Buffers, decoder_layer
from faser.engine.execution.models.weights import LayerWeights
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.blocks import (
    DecoderStack,
    LayerBuffers,
    NormedLinear,
)
from faser.kernels.interface.shapes import AttentionPlan, KvCache


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadBuffers:
    """Activations of a head's step; every step overwrites them. R: the most rows of a step.

    layers: of the layers, and of the logits. states: [R, K * H], normalised states. features, embedded: [R, Hh].
    joined: [R, 2 Hh], two rows side by side.
    """

    layers: Buffers
    states: Tensor
    features: Tensor
    embedded: Tensor
    joined: Tensor

    @classmethod
    def allocate(
        cls, spec: HeadSpec, dtype: torch.dtype, device: torch.device, *, max_rows: int, max_logit_rows: int
    ) -> "HeadBuffers":
        def rows(width: int) -> Tensor:
            return torch.empty((max_rows, width), dtype=dtype, device=device)

        logits_spec = replace(spec.decoder, vocab_size=spec.draft_vocab_size)
        return cls(
            layers=Buffers.allocate(logits_spec, dtype, device, max_rows=max_rows, max_logit_rows=max_logit_rows),
            states=rows(spec.states_size),
            features=rows(spec.hidden_size),
            embedded=rows(spec.hidden_size),
            joined=rows(2 * spec.hidden_size),
        )


class LayerStack:
    """Runs a head's layers, whose first product is the caller's.

    angles: see Decoder. logits: the product after the layers, which is fetched ahead; None: another one follows.
    """

    def __init__(
        self,
        spec: HeadSpec,
        backend: Backend,
        weights: tuple[LayerWeights, ...],
        angles: Tensor,
        buffers: Buffers,
        logits: NormedLinear | None = None,
    ) -> None:
        self._spec = spec.decoder
        self._buffers = buffers
        self._rooms: dict[int, LayerBuffers] = {}  # by the number of rows
        self._blocks = backend.blocks
        self._layers = backend.layers
        self._logits = logits
        layers = zip(weights, self._spec.windows, self._spec.rotary, strict=True)
        self.stack = DecoderStack(
            layers=tuple(
                decoder_layer(self._spec, each, window, angles if rotates else None, projects=number > 0)
                for number, (each, window, rotates) in enumerate(layers)
            ),
            head=logits,
        )

    def run(self, hidden: Tensor, cache: KvCache, plan: AttentionPlan) -> Tensor:
        """Run all layers over hidden [R, H], in place. The room for R rows holds the first layer's qkv."""
        self._layers.run(self.stack, 0, len(self.stack.layers), hidden, cache, plan, self.room(len(hidden)))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, Vd] float32 of N rows, unchanged."""
        assert self._logits is not None, "these layers have no logits after them"
        rows = len(hidden)
        return self._blocks.normed_linear(hidden, self._logits, self._buffers.logits[:rows], self.room(rows).block)

    def room(self, rows: int) -> LayerBuffers:
        """The buffers of the first rows; the same object for the same number of rows."""
        found = self._rooms.get(rows)
        if found is None:
            buffers = self._buffers
            found = self._rooms[rows] = LayerBuffers(
                qkv=buffers.qkv[:rows], mixed=buffers.mixed[:rows], block=buffers.scratch(rows)
            )
        return found
