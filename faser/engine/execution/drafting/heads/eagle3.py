"""EAGLE-3 heads: from the target's hidden states and a token to the logits of the token after it.

    position           …        p - 1                p                  p + 1
    token                                          x_p                x_{p+1}
    target's states         states of p - 1
                                   \\  features()    |
    head's row of p                 `------------> run() --> hidden --> logits() of token p + 1
    head's row of p + 1                                         `----> run() with x_{p+1}, hidden as features

The row of a position takes the token at that position and the states of the position before, those that predicted
the token. A drafted row takes the head's own output of the row before in place of features. A head knows neither
sequences nor positions: its cache holds one entry for each row that it ran, in the order of the plan's positions.
The arithmetic of a row:

    states of K layers --(norms)--> fc --> features --> hidden_norm --.
                                               |                      |--> q, k, v --> attention, feed-forward
    token --> embedding ---------------------- | --> input_norm ------'        |             |
                                               `--> residual stream -----------'          output --> norm --> head

With norm_before_residual the stream begins with the normalised features. With norm_output the output is
normalised, and the logits are a product of it.

Source: Li et al., arXiv 2503.01840, section 3.1.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from faser.engine.checkpoints.heads import FeatureNorm, HeadSpec
from faser.engine.execution.drafting.heads.vocabulary import WHOLE
from faser.engine.execution.drafting.loop import on_host
from faser.engine.execution.models.decoder import Buffers
from faser.engine.execution.models.layers import decoder_layer
from faser.engine.execution.models.rope import RotaryTables
from faser.engine.execution.models.weights import LayerWeights
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.blocks import (
    Blocks,
    DecoderStack,
    DraftRoom,
    Eagle3Stack,
    LayerBuffers,
    Layers,
    NormedLinear,
)
from faser.kernels.interface.shapes import AttentionPlan, KvCache, PackedLinear
from faser.optional import maybe


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
    _rooms: dict[int, DraftRoom] = field(default_factory=dict, init=False)  # by the number of rows

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

    def room(self, rows: int) -> DraftRoom:
        """The buffers of that many rows, the same object each time."""
        found = self._rooms.get(rows)
        if found is None:
            assert rows <= len(self.features), "more rows than the buffers hold"
            layers = self.layers
            found = self._rooms[rows] = DraftRoom(
                states=self.states[:rows],
                features=self.features[:rows],
                embedded=self.embedded[:rows],
                joined=self.joined[:rows],
                hidden=layers.hidden[:rows],
                layers=LayerBuffers(qkv=layers.qkv[:rows], mixed=layers.mixed[:rows], block=layers.scratch(rows)),
                logits=layers.logits,
            )
        return found


class Eagle3Head:
    """Head of one layer as EAGLE-3 has it. rotary: see Decoder; it has the positions of the cache's entries."""

    vocabulary = WHOLE

    def __init__(
        self,
        spec: HeadSpec,
        backend: Backend,
        weights: Eagle3Weights,
        draft_ids: Tensor | None,
        rotary: RotaryTables,
        buffers: HeadBuffers,
    ) -> None:
        self.spec = spec
        self.draft_ids = draft_ids
        self._backend = backend
        self._weights = weights
        self._buffers = buffers
        self._eps = spec.decoder.rms_norm_eps
        self._blocks: Blocks = backend.blocks
        self._layers: Layers = backend.layers
        assert weights.layers[0].input_norm is not None, "embeddings are normalised"
        self._embedding_norm = weights.layers[0].input_norm
        self._logits = NormedLinear(norm=weights.norm, eps=self._eps, linear=weights.head)
        self._stack = DecoderStack(
            layers=tuple(
                decoder_layer(spec.decoder, number, each, rotary, projects=number > 0)
                for number, each in enumerate(weights.layers)
            ),
            head=None if spec.norm_output else self._logits,
        )
        self.drafting_stack = self._drafting_stack()

    @property
    def weight_bytes(self) -> int:
        return self._weights.num_bytes

    def draft_room(self, rows: int) -> DraftRoom:
        return self._buffers.room(rows)

    def features(self, states: Tensor) -> Tensor:
        room = self.draft_room(len(states))
        return self._backend.linear(self._normed(states, room), self._weights.fc, room.features)

    def run(self, token_ids: Tensor, features: Tensor, cache: KvCache, plan: AttentionPlan) -> Tensor:
        """See Head. features stay as they are, unless they are what run returned."""
        backend, weights, eps = self._backend, self._weights, self._eps
        rows, width = features.shape
        room = self.draft_room(rows)
        joined, hidden = room.joined, room.hidden
        embedded = backend.embed(token_ids, weights.embedding, room.embedded)
        backend.rms_norm(embedded, self._embedding_norm, eps, joined[:, :width])
        normed = backend.rms_norm(features, weights.hidden_norm, eps, joined[:, width:])
        hidden.copy_(normed if self.spec.norm_before_residual else features)
        backend.linear(joined, weights.layers[0].qkv, room.layers.qkv)
        self._layers.run(self._stack, 0, len(self._stack.layers), hidden, cache, plan, room.layers)
        return backend.rms_norm(hidden, weights.norm, eps, hidden) if self.spec.norm_output else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        rows = len(hidden)
        assert rows <= len(self._buffers.layers.logits), "more rows than the logits buffer holds"
        logits = self._buffers.layers.logits[:rows]
        if self.spec.norm_output:
            return self._backend.linear(hidden, self._weights.head, logits)
        return self._blocks.normed_linear(hidden, self._logits, logits, self.draft_room(rows).layers.block)

    def _normed(self, states: Tensor, room: DraftRoom) -> Tensor:
        """The states after the norms that stand before the projection, if there are any."""
        norms = self._weights.feature_norms
        if not norms:
            return states
        if self.spec.feature_norm is FeatureNorm.TOGETHER:
            return self._backend.rms_norm(states, norms[0], self._eps, room.states)
        width = self.spec.target_hidden_size
        for index, norm in enumerate(norms):
            part = slice(index * width, (index + 1) * width)
            self._backend.rms_norm(states[:, part], norm, self._eps, room.states[:, part])
        return room.states

    def _drafting_stack(self) -> Eagle3Stack:
        weights, draft_ids = self._weights, self.draft_ids
        return Eagle3Stack(
            embedding=weights.embedding,
            embedding_norm=self._embedding_norm,
            state_norms=weights.feature_norms,
            fc=weights.fc,
            feature_norm=weights.hidden_norm,
            eps=self._eps,
            logits=self._logits,
            norm_output=self.spec.norm_output,
            residual_is_normed=self.spec.norm_before_residual,
            qkv=weights.layers[0].qkv,
            layers=self._stack,
            draft_ids=maybe(on_host, draft_ids),
        )
