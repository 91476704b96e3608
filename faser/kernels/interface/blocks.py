"""Decoder layers and their parts, as units that a backend may compute in few launches or calls.

    layer i        feed_forward(i, following: i + 1)                                  layer i + 1
    attention  ->  output product, norm, gate · up, gate, down product, norm, qkv  ->  rotation, attention

A unit ends with the product before the next attention, so that the end of one product and the norm before the next
one can be a single launch, across layers too. HeadDrafting makes all drafts of a head in one call.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from faser.kernels.interface.adapters import AdapterRows
from faser.kernels.interface.mixers import Mixer, MixerShape, StateStep
from faser.kernels.interface.sampling import SamplingMetadata
from faser.kernels.interface.shapes import AttentionPlan, AttentionShape, KvCache, PackedLinear, RowLayout
from faser.types.activation import Activation
from faser.types.arrays import Ints, Words


# Weights are equal where they are the same: backends keep what they derive from them as long as these live.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class NormedLinear:
    """A product of normalised rows. norm: [K] float32, the weight of the RMS norm; eps: see Backend.rms_norm."""

    norm: Tensor
    eps: float
    linear: PackedLinear


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Experts:
    """Gated networks, of which a router chooses top_k for each row. E: how many there are.

    router: [E, H], its logits in float32. gate_up, down: of each expert. renormalise: the weights of the chosen
    ones are divided by their sum. activation: see Backend.gate. scales: [E] float32, what the weight of each
    expert is multiplied by in the end; None: nothing. sigmoid: weights are σ of each logit in place of a softmax;
    choice_bias: [E] float32, then added for the choice alone. shared: gate_up and down of one that every row
    passes; then the router is [E + 1, H], and σ of its last logit weighs what that one gives.
    """

    router: PackedLinear
    gate_up: tuple[PackedLinear, ...]
    down: tuple[PackedLinear, ...]
    top_k: int
    renormalise: bool
    activation: Activation = Activation.SILU
    scales: Tensor | None = None
    sigmoid: bool = False
    choice_bias: Tensor | None = None
    shared: tuple[PackedLinear, PackedLinear] | None = None

    @property
    def num_logits(self) -> int:
        """That the router gives a row."""
        return len(self.gate_up) + (self.shared is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsBeside:
    """A mixture beside the network of a layer, of the same inputs.

    Norms: [H] float32, with the eps of the network's. norm: before the experts; router_norm: before the router.
    norm_after, norm_after_network: of what experts and network give, which is added up and normalised once more.
    """

    experts: Experts
    norm: Tensor
    router_norm: Tensor
    norm_after: Tensor
    norm_after_network: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInputs:
    """hidden += norm(out(activation(gate(hidden)) * p)), with inputs p of each row, [R, P], that its token gives.

    activation, eps of norm [H]: the network's. room: [max_rows, 2 P], rows at any distance: the second half is p,
    the first is overwritten.
    """

    gate: PackedLinear
    out: PackedLinear
    norm: Tensor
    room: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class FeedForward:
    """Second half of a layer, behind its attention: the output product, then the gated feed-forward network.

    activation: see Backend.gate. norm_after_attention, norm_after: [H] float32, of what the two of them add to the
    residual stream, with after_eps, or if it is None that of gate_up; both or neither. size: channels of the
    network; None: as many as the buffers have. beside: a mixture whose results join the network's; None: there is
    none. token_inputs: what tokens add in the end; None: nothing. scale: what the residual stream is multiplied by
    then.
    """

    attention_out: PackedLinear
    gate_up: NormedLinear
    down: PackedLinear
    activation: Activation = Activation.SILU
    norm_after_attention: Tensor | None = None
    norm_after: Tensor | None = None
    after_eps: float | None = None
    size: int | None = None
    beside: ExpertsBeside | None = None
    token_inputs: TokenInputs | None = None
    scale: float = 1.0

    @property
    def products(self) -> tuple[PackedLinear, ...]:
        """Return the products of attention and network."""
        return (self.attention_out, self.gate_up.linear, self.down)

    @property
    def is_usual(self) -> bool:
        """SiLU, and nothing normalised after a product: what kernels that join several of these steps compute."""
        return self.activation is Activation.SILU and self.norm_after is None

    @property
    def ends_with_network(self) -> bool:
        """Return whether network and norms are all there is."""
        return self.beside is None and self.token_inputs is None and self.scale == 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class MixedFeedForward:
    """Second half of a layer, behind its attention: the output product, then a mixture of experts of normed rows.

    norm, eps: see NormedLinear.
    """

    attention_out: PackedLinear
    norm: Tensor
    eps: float
    experts: Experts

    @property
    def products(self) -> tuple[PackedLinear, ...]:
        """All but the router."""
        experts = self.experts
        return (self.attention_out, *experts.gate_up, *experts.down, *(experts.shared or ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBuffers:
    """Room for R rows; arbitrary afterwards. normed: [R, H]; gate_up: [R, 2 F]; inner: [R, F].

    slots: see Backend.row_slots; unchanged. adapted: see Adapters.rows; None: products are not adapted.
    """

    normed: Tensor
    gate_up: Tensor
    inner: Tensor
    slots: Tensor | None = None
    adapted: AdapterRows | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """A layer. angles, query_angles, norms of heads, eps: see Backend.rope_append; sinks: see Backend.attend.

    shape: of its attention, or of the mixer that it has instead: then with that, and the product of its rates,
    where it has any.
    qkv: all columns of the shape. None: its caller computes it, of something else than the layer's inputs.
    wide_norms: float32 weights of RMS norms of all queries of a row together, [Hq * D], and of all its keys.
    states: [max_rows, H], rows at any distance: room for the inputs of the layer, in a step that captures.
    kv_layer: number of the layer whose keys and values are read, where the shape reads another one's. lent: the
    cache of another model with the same blocks, which has that layer; None: it is in the layer's own cache.
    """

    qkv: NormedLinear | None
    shape: AttentionShape | MixerShape
    angles: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    feed_forward: FeedForward | MixedFeedForward
    wide_norms: tuple[Tensor, Tensor] | None = None
    query_angles: Tensor | None = None
    sinks: Tensor | None = None
    states: Tensor | None = None
    rates: NormedLinear | None = None
    mixer: Mixer | None = None
    v_norm: Tensor | None = None
    kv_layer: int | None = None
    lent: KvCache | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class DecoderStack:
    """All layers of a model, and the head that follows them. Only the first one's qkv may be None."""

    layers: tuple[DecoderLayer, ...]
    head: NormedLinear | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBuffers:
    """Room for R rows; arbitrary afterwards. qkv: [R, columns]; mixed: [R, q_size]; of the widest layers.

    Another layer uses the beginning of their memory, see columns_of. rates: [R, rate_columns] float32, in models
    whose mixers have rates.
    """

    qkv: Tensor
    mixed: Tensor
    block: BlockBuffers
    rates: Tensor | None = None


def columns_of(room: Tensor, columns: int) -> Tensor:
    """Return the beginning of room's memory as [R, columns] without gaps. room: [R, at least as many]."""
    return room if room.shape[1] == columns else room.view(-1)[: room.shape[0] * columns].view(-1, columns)


class Blocks(Protocol):
    """Units of a layer. Their results are those of the backend's single operations, but for roundings between."""

    def normed_linear(self, hidden: Tensor, product: NormedLinear, out: Tensor, buffers: BlockBuffers) -> Tensor:
        """out = linear(rms_norm(hidden)). hidden: [R, K], unchanged. out: as in Backend.linear."""
        ...

    def feed_forward(
        self,
        mixed: Tensor,
        hidden: Tensor,
        block: FeedForward | MixedFeedForward,
        following: NormedLinear | None,
        out: Tensor,
        buffers: BlockBuffers,
    ) -> None:
        """hidden += attention_out(mixed); hidden += network(norm(hidden)); out = following(hidden).

        mixed: [R, Hq * D]. hidden: [R, H], the residual stream, in place. following: the product of the next
        layer; None: out is not written.
        """
        ...


class Mixtures(Protocol):
    """Mixtures of experts with the norms before them. Their results are those of the single operations."""

    def add(
        self,
        hidden: Tensor,
        norm: Tensor,
        eps: float,
        block: Experts,
        into: Tensor,
        buffers: BlockBuffers,
        *,
        router_norm: Tensor | None = None,
    ) -> None:
        """into += experts(rms_norm(hidden)); see Backend.experts.

        hidden, into: [R, H]; they may be the same. router_norm: [H] float32, before the router; None: norm.
        """
        ...


class Layers(Protocol):
    """Whole layers. Their results are those of Blocks and of the backend's attention."""

    def separate(self, stack: DecoderStack) -> Collection[int]:
        """Return the layers that run in single operations on a backend that has one call for whole layers."""
        ...

    def run(
        self,
        stack: DecoderStack,
        first: int,
        last: int,
        hidden: Tensor,
        cache: KvCache,
        plan: AttentionPlan,
        buffers: LayerBuffers,
        *,
        captures: bool = False,
        state_step: StateStep | None = None,
    ) -> None:
        """Layers first … last - 1 over hidden [R, H], in place; their keys and values enter the cache.

        buffers: qkv holds that of the first layer where this has no product of its own.
        captures: those layers that have room for states copy their inputs there first. state_step: where mixers
        go on; None: there are none.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class HeadStack:
    """Weights of a head that drafts, as far as both kinds have them.

    embedding_norm, feature_norm: [H], before an embedding and features stand side by side. logits: its norm is
    that of the output. norm_output: a further pass takes the normalised output. draft_ids: [Vd] int64, the
    target's token of each row of the logits; None: the same.
    """

    embedding: PackedLinear
    embedding_norm: Tensor
    feature_norm: Tensor
    eps: float
    layers: DecoderStack
    logits: NormedLinear
    norm_output: bool
    draft_ids: Ints | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Eagle3Stack(HeadStack):
    """An EAGLE-3 head. state_norms: of equal parts of the states, side by side; none: they stay as they are.

    fc: from states to features. residual_is_normed: the residual stream begins with the normalised features.
    qkv: of the first layer, whose own is None: of an embedding and features side by side.
    """

    state_norms: tuple[Tensor, ...]
    fc: PackedLinear
    residual_is_normed: bool
    qkv: PackedLinear


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class MtpStack(HeadStack):
    """An MTP layer. final_norm: the target's, from states to features.

    fc: from an embedding and features side by side to the residual stream.
    """

    final_norm: Tensor
    fc: PackedLinear


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class DraftRoom:
    """Room for the R rows of the first pass. states: [R, K * H]. features, embedded, hidden: [R, H].

    joined: [R, 2 H]. logits: [N, Vd]: at most N sequences draft at once.
    """

    states: Tensor
    features: Tensor
    embedded: Tensor
    joined: Tensor
    hidden: Tensor
    layers: LayerBuffers
    logits: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StopNumbers:
    """Numbers of the rule by which drafts end: see StopRule of engine/contract/plan.py."""

    row_price: float
    pass_prices: tuple[float, ...]
    intercept: float
    slope: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRules:
    """max_tokens: [S] int64, at least 1. stop: None: drafts have max_tokens.

    metadata, noise: how tokens are predicted (see SamplingKernels.predict), and [S, width] random words by which,
    with width the most max_tokens; None: every token is the most likely one.
    """

    max_tokens: Ints
    stop: StopNumbers | None = None
    metadata: SamplingMetadata | None = None
    noise: Words | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRows:
    """Committed tokens that the head has not read, of S sequences. token_ids: [R] int64.

    states: [R, K * H], the target's, of the positions before the tokens. layout: their positions are places in the
    head's cache; its blocks have room for the drafts, which follow.
    """

    token_ids: Tensor
    states: Tensor
    layout: RowLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedTokens:
    """token_ids: [S, width] int64, and margins, float64, in nats, -100 to 100; of row s the first counts[s] count.

    num_fed: [S] how many leading tokens of each draft are in the head's cache. passes: with that over the rows.
    """

    token_ids: Ints
    margins: NDArray[np.float64]
    counts: Ints
    num_fed: Ints
    passes: int


class HeadDrafting(Protocol):
    """Drafts as HeadPassLoop does pass by pass, which is the oracle."""

    def takes(self, stack: HeadStack) -> bool:
        """Return whether it can draft with this head."""
        ...

    def without_middle(self, packed: PackedLinear, count: int) -> PackedLinear:
        """Return low-bit rows [N, K] without those of their first part from `count` on, in the same memory.

        count: a multiple of 64.
        """
        ...

    def draft(
        self, stack: HeadStack, cache: KvCache, rows: HeadRows, rules: DraftRules, room: DraftRoom
    ) -> DraftedTokens: ...
