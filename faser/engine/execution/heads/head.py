"""The seam of heads: from the target's hidden states and a token to the logits of the token after it.

    position           …        p - 1                p                  p + 1
    token                                          x_p                x_{p+1}
    target's states         states of p - 1
                                   \\  features()    |
    head's row of p                 `------------> run() --> hidden --> logits() of token p + 1
    head's row of p + 1                                         `----> run() with x_{p+1}, hidden as features

The row of a position takes the token at that position and the states of the position before, those that predicted
the token. A drafted row takes the head's own output of the row before in place of features. A head knows neither
sequences nor positions: its cache holds one entry for each row that it ran, in the order of the plan's positions.

Source: Li et al., arXiv 2503.01840, section 3.1; the "features" of arXiv 2401.15077, section 3.
"""

from typing import Protocol

from torch import Tensor

from faser.engine.checkpoints.heads.head_spec import HeadSpec
from faser.kernels.interface.blocks import DraftRoom, Eagle3Stack
from faser.kernels.interface.shapes import AttentionPlan, KvCache


class Head(Protocol):
    """A loaded head. It runs one step at a time, and allocates nothing during it.

    Tensors are on the backend's device, activations in the type of the target's. What a method returns is a part
    of a buffer, which the next call of the same method overwrites. R: at most max_rows, N: at most max_logit_rows.
    """

    @property
    def spec(self) -> HeadSpec: ...

    @property
    def draft_ids(self) -> Tensor | None:
        """[Vd] int64, distinct: the target's id of each row of the logits; None: the target's vocabulary."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weights; those shared with the target are not counted."""
        ...

    @property
    def drafting_stack(self) -> Eagle3Stack | None:
        """What HeadDrafting takes; None: it drafts no such heads."""
        ...

    def draft_room(self, rows: int) -> DraftRoom:
        """The buffers of that many rows, the same object each time, for heads with a drafting_stack."""
        ...

    def features(self, states: Tensor) -> Tensor:
        """[R, Hh] of the target's states [R, K * H], the layers of spec.state_layers side by side; unchanged."""
        ...

    def run(self, token_ids: Tensor, features: Tensor, cache: KvCache, plan: AttentionPlan) -> Tensor:
        """[R, Hh], the output of the rows; their keys and values enter the cache.

        token_ids: [R] int64, contiguous, of the target's vocabulary. features: [R, Hh], unchanged; may be what
        run returned, its first R rows. cache: of spec.decoder's layers and heads. plan: of these rows.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, Vd] float32 for any N rows of what run returned; unchanged."""
        ...
