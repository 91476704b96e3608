"""All drafts of an EAGLE-3 head in one call, by a backend that is faster than Python between its operations."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from faser.kernels.interface.blocks import DecoderStack, LayerBuffers
from faser.kernels.interface.sampling import SamplingMetadata
from faser.kernels.interface.shapes import KvCache, PackedLinear, RowLayout

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Eagle3Stack:
    """A head's weights. state_norms: of equal parts of the states, side by side; none: they stay as they are.

    fc: from states to features. embedding_norm, feature_norm: [H]. qkv: of an embedding and features side by side.
    residual_is_normed: the residual stream begins with the normalised features. layers: the first one's qkv is
    None; its head, the product of the logits, is there. draft_ids: [Vd] int64, the target's token of each row of
    the logits; None: the same.
    """

    embedding: PackedLinear
    embedding_norm: Tensor
    state_norms: tuple[Tensor, ...]
    fc: PackedLinear
    feature_norm: Tensor
    eps: float
    residual_is_normed: bool
    qkv: PackedLinear
    layers: DecoderStack
    draft_ids: Ints | None


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
    """See StopRule of engine/contract/plan.py."""

    row_price: float
    pass_prices: tuple[float, ...]
    intercept: float
    slope: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRules:
    """max_tokens: [S] int64, at least 1. stop: None: drafts have max_tokens.

    metadata, uniforms: how tokens are predicted (see SamplingKernels.nearest), and [S, width] float64 by what
    numbers, with width the most max_tokens; None: every token is the most likely one.
    """

    max_tokens: Ints
    window: float
    stop: StopNumbers | None = None
    metadata: SamplingMetadata | None = None
    uniforms: NDArray[np.float64] | None = None


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

    def takes(self, stack: Eagle3Stack) -> bool:
        """Whether it can draft with this head."""
        ...

    def draft(
        self, stack: Eagle3Stack, cache: KvCache, rows: HeadRows, rules: DraftRules, room: DraftRoom
    ) -> DraftedTokens: ...
