"""EAGLE-3 heads (Li et al., arXiv 2503.01840): the arithmetic of a row, on one backend.

    states of K layers --(norms)--> fc --> features --> hidden_norm --.
                                               |                      |--> q, k, v --> attention, feed-forward
    token --> embedding ---------------------- | --> input_norm ------'        |             |
                                               `--> residual stream -----------'          output --> norm --> head

With norm_before_residual the stream begins with the normalised features. With norm_output the output is
normalised, and the logits are a product of it.
"""

from dataclasses import dataclass

from torch import Tensor

from faser.engine.checkpoints.heads.head_spec import FeatureNorm, HeadSpec
from faser.engine.execution.heads.layer_stack import HeadBuffers, LayerStack
from faser.engine.execution.models.weights import LayerWeights
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.blocks import DraftRoom, Eagle3Stack, NormedLinear
from faser.kernels.interface.shapes import AttentionPlan, KvCache, PackedLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Weights:
    """feature_norms: one for each state layer, one for all together, or none. norm: before the logits.

    layers: the first one's qkv is a product of an embedding and features side by side, its input_norm is of the
    embedding, and hidden_norm of the features. embedding and head may be the target's. num_bytes: of what is not
    the target's.
    """

    embedding: PackedLinear
    feature_norms: tuple[Tensor, ...]
    fc: PackedLinear
    hidden_norm: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: PackedLinear
    num_bytes: int


class Eagle3Head:
    """See Head. draft_ids: on the backend's device. angles: see Decoder; entries of the cache are below P."""

    def __init__(
        self,
        spec: HeadSpec,
        backend: Backend,
        weights: Eagle3Weights,
        draft_ids: Tensor | None,
        angles: Tensor,
        buffers: HeadBuffers,
    ) -> None:
        self._spec = spec
        self._draft_ids = draft_ids
        self._backend = backend
        self._weights = weights
        self._buffers = buffers
        self._eps = spec.decoder.rms_norm_eps
        assert weights.layers[0].input_norm is not None, "embeddings are normalised"
        self._embedding_norm = weights.layers[0].input_norm
        logits = None
        if not spec.norm_output:
            logits = NormedLinear(norm=weights.norm, eps=self._eps, linear=weights.head)
        self._stack = LayerStack(spec, backend, weights.layers, angles, buffers.layers, logits)
        self._rooms: dict[int, DraftRoom] = {}  # by the number of rows
        self._drafting_stack = None
        if logits is not None:
            self._drafting_stack = Eagle3Stack(
                embedding=weights.embedding,
                embedding_norm=self._embedding_norm,
                state_norms=weights.feature_norms,
                fc=weights.fc,
                feature_norm=weights.hidden_norm,
                eps=self._eps,
                residual_is_normed=spec.norm_before_residual,
                qkv=weights.layers[0].qkv,
                layers=self._stack.stack,
                draft_ids=None if draft_ids is None else draft_ids.numpy(force=True),
            )

    @property
    def spec(self) -> HeadSpec:
        return self._spec

    @property
    def draft_ids(self) -> Tensor | None:
        return self._draft_ids

    @property
    def weight_bytes(self) -> int:
        return self._weights.num_bytes

    @property
    def drafting_stack(self) -> Eagle3Stack | None:
        return self._drafting_stack

    def draft_room(self, rows: int) -> DraftRoom:
        assert rows <= len(self._buffers.features), "more rows than the buffers hold"
        found = self._rooms.get(rows)
        if found is None:
            buffers = self._buffers
            found = self._rooms[rows] = DraftRoom(
                states=buffers.states[:rows],
                features=buffers.features[:rows],
                embedded=buffers.embedded[:rows],
                joined=buffers.joined[:rows],
                hidden=buffers.layers.hidden[:rows],
                layers=self._stack.room(rows),
                logits=buffers.layers.logits,
            )
        return found

    def features(self, states: Tensor) -> Tensor:
        rows = len(states)
        assert rows <= len(self._buffers.features), "more rows than the buffers hold"
        return self._backend.linear(self._normed(states), self._weights.fc, self._buffers.features[:rows])

    def run(self, token_ids: Tensor, features: Tensor, cache: KvCache, plan: AttentionPlan) -> Tensor:
        backend, buffers, weights, eps = self._backend, self._buffers, self._weights, self._eps
        rows, width = features.shape
        assert rows <= len(buffers.features), "more rows than the buffers hold"
        joined, hidden = buffers.joined[:rows], buffers.layers.hidden[:rows]
        embedded = backend.embed(token_ids, weights.embedding, buffers.embedded[:rows])
        backend.rms_norm(embedded, self._embedding_norm, eps, joined[:, :width])
        normed = backend.rms_norm(features, weights.hidden_norm, eps, joined[:, width:])
        hidden.copy_(normed if self._spec.norm_before_residual else features)
        backend.linear(joined, weights.layers[0].qkv, self._stack.room(rows).qkv)
        self._stack.run(hidden, cache, plan)
        return backend.rms_norm(hidden, weights.norm, eps, hidden) if self._spec.norm_output else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        rows = len(hidden)
        assert rows <= len(self._buffers.layers.logits), "more rows than the logits buffer holds"
        if self._spec.norm_output:
            return self._backend.linear(hidden, self._weights.head, self._buffers.layers.logits[:rows])
        return self._stack.logits(hidden)

    def _normed(self, states: Tensor) -> Tensor:
        """The states after the norms that stand before the projection, if there are any."""
        norms = self._weights.feature_norms
        if not norms:
            return states
        normed = self._buffers.states[: len(states)]
        if self._spec.feature_norm is FeatureNorm.TOGETHER:
            return self._backend.rms_norm(states, norms[0], self._eps, normed)
        width = self._spec.target_hidden_size
        for index, norm in enumerate(norms):
            part = slice(index * width, (index + 1) * width)
            self._backend.rms_norm(states[:, part], norm, self._eps, normed[:, part])
        return normed
