"""The decoder layers of a head: from the queries, keys and values of the first one to the output of the last."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from faser.engine.checkpoints.heads.head_spec import HeadSpec
from faser.engine.execution.models.decoder import Buffers
from faser.engine.execution.models.weights import LayerWeights
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.blocks import BlockBuffers, Blocks, FeedForward, NormedLinear
from faser.kernels.interface.separate_blocks import SeparateBlocks
from faser.kernels.interface.shapes import AttentionPlan, AttentionShape, KvCache


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

        logits_spec = dataclasses.replace(spec.decoder, vocab_size=spec.draft_vocab_size)
        return cls(
            layers=Buffers.allocate(logits_spec, dtype, device, max_rows=max_rows, max_logit_rows=max_logit_rows),
            states=rows(spec.states_size),
            features=rows(spec.hidden_size),
            embedded=rows(spec.hidden_size),
            joined=rows(2 * spec.hidden_size),
        )


class LayerStack:
    """Runs a head's layers, whose first product is the caller's. angles: see Decoder."""

    def __init__(
        self, spec: HeadSpec, backend: Backend, weights: tuple[LayerWeights, ...], angles: Tensor, buffers: Buffers
    ) -> None:
        decoder = spec.decoder
        self.blocks: Blocks = backend.fused_blocks or SeparateBlocks(backend)
        self._backend = backend
        self._eps = decoder.rms_norm_eps
        self._weights = weights
        self._buffers = buffers
        self._scratch: dict[int, BlockBuffers] = {}  # by the number of rows
        self._feed_forward = tuple(
            FeedForward(
                attention_out=each.attention_out,
                gate_up=NormedLinear(norm=each.post_norm, eps=self._eps, linear=each.gate_up),
                down=each.down,
            )
            for each in weights
        )
        self._following = (*map(self._normed_qkv, weights[1:]), None)
        self._angles = tuple(angles if rotates else None for rotates in decoder.rotary)
        self._shapes = tuple(
            AttentionShape(
                num_heads=decoder.num_heads,
                num_kv_heads=decoder.num_kv_heads,
                head_dim=decoder.head_dim,
                scale=decoder.head_dim**-0.5,
                window=window,
            )
            for window in decoder.windows
        )

    def _normed_qkv(self, weights: LayerWeights) -> NormedLinear:
        assert weights.input_norm is not None, "only a head's first layer has no input norm"
        return NormedLinear(norm=weights.input_norm, eps=self._eps, linear=weights.qkv)

    def scratch(self, rows: int) -> BlockBuffers:
        """The buffers within a layer, of the first rows; the same object for the same number of rows."""
        found = self._scratch.get(rows)
        if found is None:
            found = self._scratch[rows] = self._buffers.scratch(rows)
        return found

    def run(self, qkv: Tensor, hidden: Tensor, cache: KvCache, plan: AttentionPlan) -> Tensor:
        """Run all layers. qkv: of the first layer, [R, (Hq + 2 Hkv) * D], overwritten. hidden: in place."""
        backend, rows = self._backend, len(hidden)
        mixed, scratch = self._buffers.mixed[:rows], self.scratch(rows)
        for layer, weights in enumerate(self._weights):
            shape = self._shapes[layer]
            queries = backend.rope_append(
                qkv,
                self._angles[layer],
                cache,
                layer,
                shape,
                plan,
                q_norm=weights.q_norm,
                k_norm=weights.k_norm,
                eps=self._eps,
            )
            backend.attend(queries, cache, layer, shape, plan, mixed)
            self.blocks.feed_forward(
                mixed, hidden, self._feed_forward[layer], self._following[layer], qkv, scratch
            )
        return hidden
