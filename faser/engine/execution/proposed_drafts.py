"""What the drafter proposed for the step in progress, looked up by the rows that verify it.

The control plane may cut any draft before the step, and an overlapped step has already decided the first token of
every draft. So each drafted row has to find its line among the proposed tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.contract.plan import Draft, SequenceRows
from faser.engine.execution.drafters.drafter import Proposals
from faser.engine.execution.text_lookup.text_and_model import with_text_drafts


class ProposedDrafts:
    """Holds the proposals of one drafting until the step that verifies them is over."""

    def __init__(self) -> None:
        self._proposals: Proposals | None = None
        self._num_decided = 0

    def hold(self, proposals: Proposals, *, num_decided: int = 0) -> None:
        """num_decided: leading tokens of every draft that are already accepted or refused when it is verified."""
        self._proposals, self._num_decided = proposals, num_decided

    def add_from_text(self, rows: Sequence[SequenceRows]) -> None:
        """The model proposed for some sequences only; the drafted rows of the others are copied from text."""
        if self._proposals is not None:
            self._proposals = with_text_drafts(self._proposals, rows, num_decided=self._num_decided)

    def drop(self) -> None:
        self._proposals = None

    def probs(self, rows: Sequence[SequenceRows]) -> Tensor | None:
        """[T, V] float64, the distribution that each drafted row's token was sampled from; None: point masses."""
        if self._proposals is None or self._proposals.probs is None:
            return None
        lines = proposal_lines(rows, self._proposals.drafts, num_decided=self._num_decided)
        return self._proposals.probs[torch.from_numpy(lines)]


def proposal_lines(
    rows: Sequence[SequenceRows], drafts: Sequence[Draft], *, num_decided: int = 0
) -> NDArray[np.int64]:
    """[T] for each drafted row of a step, the index of its token among the tokens of all drafts in order.

    rows: each one with drafted tokens has a draft of the same slot. num_decided: as in ProposedDrafts.hold.
    """
    lengths = np.fromiter((len(each.token_ids) for each in drafts), np.int64, len(drafts))
    firsts = dict(zip((each.slot for each in drafts), (np.cumsum(lengths) - lengths).tolist(), strict=True))
    drafting = [each for each in rows if each.num_drafts]
    counts = np.fromiter((each.num_drafts for each in drafting), np.int64, len(drafting))
    starts = np.fromiter((firsts[each.slot] + num_decided for each in drafting), np.int64, len(drafting))
    return np.arange(counts.sum()) + np.repeat(starts - np.cumsum(counts) + counts, counts)
