"""EAGLE heads (Li et al., arXiv 2401.15077, section 3; EAGLE-2's are the same): the arithmetic of a row.

    states after the last layer --> the target's final norm --> features --.
                                                                           |--> fc --> layer without input norm
    token --> embedding ---------------------------------------------------'               |
                                                            output --> the target's head <-'

The output estimates the target's normalised states of the next position, so the target's head reads it as it is.
"""

from dataclasses import dataclass

from torch import Tensor

from faser.engine.checkpoints.heads.head_spec import HeadSpec
from faser.engine.execution.heads.layer_stack import HeadBuffers, LayerStack
from faser.engine.execution.models.weights import LayerWeights
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.blocks import DraftRoom
from faser.kernels.interface.shapes import AttentionPlan, KvCache, PackedLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleWeights:
    """layers: the first one has no input norm. target_norm: [H], the target's final norm, of target_eps.

    embedding and head may be the target's. num_bytes: of what is not the target's.
    """

    embedding: PackedLinear
    fc: PackedLinear
    layers: tuple[LayerWeights, ...]
    head: PackedLinear
    target_norm: Tensor
    target_eps: float
    num_bytes: int


class EagleHead:
    """See Head. angles: see Decoder; entries of the cache are below P."""

    def __init__(
        self, spec: HeadSpec, backend: Backend, weights: EagleWeights, angles: Tensor, buffers: HeadBuffers
    ) -> None:
        self._spec = spec
        self._backend = backend
        self._weights = weights
        self._buffers = buffers
        self._stack = LayerStack(spec, backend, weights.layers, angles, buffers.layers)

    @property
    def spec(self) -> HeadSpec:
        return self._spec

    @property
    def draft_ids(self) -> Tensor | None:
        return None

    @property
    def weight_bytes(self) -> int:
        return self._weights.num_bytes

    @property
    def drafting_stack(self) -> None:
        return None

    def draft_room(self, rows: int) -> DraftRoom:
        raise AssertionError(f"this head has no drafting_stack, and no room for {rows} rows")

    def features(self, states: Tensor) -> Tensor:
        rows, weights = len(states), self._weights
        assert rows <= len(self._buffers.features), "more rows than the buffers hold"
        return self._backend.rms_norm(
            states, weights.target_norm, weights.target_eps, self._buffers.features[:rows]
        )

    def run(self, token_ids: Tensor, features: Tensor, cache: KvCache, plan: AttentionPlan) -> Tensor:
        backend, buffers, weights = self._backend, self._buffers, self._weights
        rows, width = features.shape
        assert rows <= len(buffers.features), "more rows than the buffers hold"
        joined = buffers.joined[:rows]
        joined[:, :width].copy_(backend.embed(token_ids, weights.embedding, buffers.embedded[:rows]))
        joined[:, width:].copy_(features)
        hidden = backend.linear(joined, weights.fc, buffers.layers.hidden[:rows])
        backend.linear(hidden, weights.layers[0].qkv, self._stack.room(rows).qkv)
        return self._stack.run(hidden, cache, plan)

    def logits(self, hidden: Tensor) -> Tensor:
        rows = len(hidden)
        assert rows <= len(self._buffers.layers.logits), "more rows than the logits buffer holds"
        return self._backend.linear(hidden, self._weights.head, self._buffers.layers.logits[:rows])
