"""Medusa heads (Cai et al., arXiv 2401.10774, section 2.1.1): each drafts one position, all from the same states.

    states after the last layer --> the target's final norm --> features --> x <- x + silu(W x + b), for each block
                                                                             |
                                                      logits of the head <-- ' its own product, or the target's

Head 0 drafts the token after the last known one, head 1 the one after that: none of them reads what was drafted.
There is no attention, so nothing enters the cache.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from faser.engine.checkpoints.heads.head_spec import HeadSpec
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.blocks import DraftRoom
from faser.kernels.interface.shapes import AttentionPlan, KvCache, PackedLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaBlocks:
    """One head. blocks: [H, H] each, in their order. head: the product of its logits, perhaps the target's."""

    blocks: tuple[PackedLinear, ...]
    head: PackedLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaWeights:
    """heads: by the position that they draft. target_norm: [H], the target's final norm, of target_eps.

    num_bytes: of what is not the target's.
    """

    heads: tuple[MedusaBlocks, ...]
    target_norm: Tensor
    target_eps: float
    num_bytes: int


class MedusaHead:
    """See Head, whose rows are those of the protocol: the n-th run after a call of features is of the n-th head.

    Its output is the features, unchanged. A draft has at most as many tokens as there are heads.
    """

    def __init__(
        self,
        spec: HeadSpec,
        backend: Backend,
        weights: MedusaWeights,
        dtype: torch.dtype,
        *,
        max_rows: int,
        max_logit_rows: int,
    ) -> None:
        self._spec = spec
        self._backend = backend
        self._weights = weights
        self._position = 0  # of the draft: the head whose turn it is, plus one

        def rows(count: int, width: int, dtype: torch.dtype) -> Tensor:
            return torch.empty((count, width), dtype=dtype, device=backend.device)

        self._features = rows(max_rows, spec.hidden_size, dtype)
        self._stream = rows(max_logit_rows, spec.hidden_size, dtype)
        self._inner = rows(max_logit_rows, spec.hidden_size, dtype)
        self._logits = rows(max_logit_rows, spec.draft_vocab_size, torch.float32)

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
        assert rows <= len(self._features), "more rows than the buffers hold"
        self._position = 0
        return self._backend.rms_norm(states, weights.target_norm, weights.target_eps, self._features[:rows])

    def run(self, token_ids: Tensor, features: Tensor, cache: KvCache, plan: AttentionPlan) -> Tensor:
        del token_ids, cache, plan
        assert self._position < len(self._weights.heads), "a longer draft than there are heads"
        self._position += 1
        return features

    def logits(self, hidden: Tensor) -> Tensor:
        rows = len(hidden)
        assert rows <= len(self._logits), "more rows than the logits buffer holds"
        head = self._weights.heads[self._position - 1]
        stream, inner = self._stream[:rows].copy_(hidden), self._inner[:rows]
        for block in head.blocks:
            stream += functional.silu(self._backend.linear(stream, block, inner), inplace=True)
        return self._backend.linear(stream, head.head, self._logits[:rows])
