"""The model of a runner: a decoder, or a head that drafts as a decoder does (drafting/heads/decoder.py)."""

from typing import Protocol

from torch import Tensor

from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.kernels.interface.adapters import AdapterRows
from faser.kernels.interface.mixers import StateStep
from faser.kernels.interface.shapes import AttentionPlan, KvCache, RowLayout


class RunnableModel(Protocol):
    """Model that computes one step at a time, in buffers that stay in place. See Decoder."""

    @property
    def spec(self) -> DecoderSpec: ...

    @property
    def hidden(self) -> Tensor:
        """Return the buffer [max_rows, H] whose first rows are those of a step."""
        ...

    @property
    def states(self) -> Tensor:
        """Return the buffer [max_rows, K * H] of captured states; K is 0 where nothing is captured."""
        ...

    @property
    def logit_rows(self) -> Tensor:
        """Return the buffer [max_logit_rows, V] float32 whose first rows logits returns."""
        ...

    def embed(self, token_ids: Tensor) -> Tensor: ...

    @property
    def adapts(self) -> bool:
        """Return whether rows may have adapters."""
        ...

    def adapter_rows(self, layout: RowLayout, /) -> AdapterRows | None: ...

    def run_layers(
        self,
        hidden: Tensor,
        first: int,
        last: int,
        cache: KvCache,
        plan: AttentionPlan,
        *,
        captures: bool = False,
        state_step: StateStep | None = None,
        adapted: AdapterRows | None = None,
    ) -> Tensor: ...

    def keep_rows(self, rows: Tensor) -> None: ...

    def fill_cache(self, num_rows: int, cache: KvCache, plan: AttentionPlan) -> None: ...

    def normed(self, hidden: Tensor, /) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...
