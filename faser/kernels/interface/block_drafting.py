"""Drafts of block drafters in one call: their weights, rows and room, as units that a backend may compute."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from faser.kernels.interface.blocks import DecoderStack, DraftedTokens, DraftRules, LayerBuffers, NormedLinear
from faser.kernels.interface.shapes import KvCache, PackedLinear
from faser.types.arrays import Ints


# Equal where it is the same: backends keep what they derive from it as long as it lives.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class BlockStack:
    """Weights of a block drafter.

    mask: [H], the embedding of the rows behind an anchor, in the type of activations; None: that of mask_token.
    fc, hidden_norm: from states to features, [H]. eps: of this norm and the layers'. causal: of each layer.
    logits: its norm is that of the output. num_candidates: of each row. draft_ids: [Vd] int64, the target's token
    of each row of the logits; None: the same. predicts_from_anchor: else the anchor predicts no token.
    markov: [V, r] of the token before and [Vd, r] of each row of the logits; None: scores are not corrected.
    confidence: [H] of hidden, [r] or [0] of the token before, both float32, and the bias; None: there is none.
    """

    embedding: PackedLinear
    mask: Tensor | None
    mask_token: int
    fc: PackedLinear
    hidden_norm: Tensor
    eps: float
    layers: DecoderStack
    causal: tuple[bool, ...]
    logits: NormedLinear
    num_candidates: int
    draft_ids: Ints | None
    predicts_from_anchor: bool
    markov: tuple[PackedLinear, PackedLinear] | None
    confidence: tuple[Tensor, Tensor, float] | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class BlockRoom:
    """Room for the R rows of a pass. inputs, hidden: [R, H]. logits: [N, Vd]: N rows at once, of any number."""

    inputs: Tensor
    hidden: Tensor
    layers: LayerBuffers
    logits: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockInputs:
    """Inputs of S sequences: context rows, and a block behind each. starts, context: [S] int32.

    starts: places of the first context rows. context: how many there are. anchors: [S] int64, the last tokens.
    states: [R, K * H] of all context rows. block_table: [S, B] int32; see RowLayout.
    """

    starts: Ints
    context: Ints
    anchors: Ints
    states: Tensor
    block_table: Tensor


class BlockDrafting(Protocol):
    """Drafts as BlockLoop makes them operation by operation, which is the oracle."""

    def takes(self, stack: BlockStack) -> bool:
        """Return whether it can draft with this drafter."""
        ...

    def draft(
        self, stack: BlockStack, cache: KvCache, inputs: BlockInputs, rules: DraftRules, room: BlockRoom
    ) -> DraftedTokens:
        """Draft as many tokens as the rules say; these have no stop. The room has all rows of the pass."""
        ...
