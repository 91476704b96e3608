"""How poorly drafted tokens rank in the middle of a forward.

The hidden state of the row before a drafted token is a noisy preview of the logits that will verify it. The judge
scores the drafted token and the drafter's own likely tokens by it, and counts how many of these score higher.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.contract.plan import SequenceRows
from faser.engine.execution.drafting.drafter import NO_TOP
from faser.engine.execution.runner.batch import RowBatch
from faser.engine.execution.runner.runner import Runner

Ints = NDArray[np.int64]

NUM_TOP = 32  # likely tokens that a drafted one is compared with
UNKNOWN = -1  # in place of a count: the drafter named no other token


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedTokens:
    """The T drafted tokens of a step of S sequences, sequence after sequence.

    num_drafts: [S] γ. sequence: [T] the sequence of each token, 0 … S - 1. depth: [T] drafted tokens before it.
    judged_by: [T] the row whose logits verify it. slots: [T]. token_ids: [T] int64. top_ids: [T, M] int64, as in
    Proposals.
    """

    num_drafts: Ints
    sequence: Ints
    depth: Ints
    judged_by: Ints
    slots: Ints
    token_ids: Tensor
    top_ids: Tensor


class Judge(Protocol):
    """Says how poorly drafted tokens rank after the layers that the runner has run so far."""

    def counts(self, runner: Runner, drafted: DraftedTokens) -> Ints:
        """[T] tokens that beat each drafted one; UNKNOWN where there are none to compare with.

        Leaves the forward as it is.
        """
        ...


class RankJudge:
    """Compares each drafted token with the drafter's own likely tokens.

    A count over some tokens is at most the rank in the whole vocabulary, so it flags no token that the rank would
    not; and it costs M + 1 products of a hidden state instead of V. A score that is not a number beats nothing.
    """

    @torch.inference_mode()
    def counts(self, runner: Runner, drafted: DraftedTokens) -> Ints:
        own, others = drafted.token_ids[:, None], drafted.top_ids
        scores = runner.preview(drafted.judged_by, torch.cat((own, others), 1).clamp_(min=0))
        beaten = (scores[:, 1:] > scores[:, :1]) & (others != own) & (others != NO_TOP)
        counts = beaten.sum(-1).masked_fill_((others == NO_TOP).all(-1), UNKNOWN)
        return counts.cpu().numpy()


def drafted_tokens(rows: tuple[SequenceRows, ...], batch: RowBatch, top_ids: Tensor) -> DraftedTokens:
    """The drafted tokens of a step's rows. top_ids: [T, M] in the same order."""
    num_drafts = np.fromiter((each.num_drafts for each in rows), np.int64, len(rows))
    slots = np.fromiter((each.slot for each in rows), np.int64, len(rows))
    sequence = np.repeat(np.arange(len(rows)), num_drafts)
    depth = np.arange(len(sequence)) - np.repeat(np.cumsum(num_drafts) - num_drafts, num_drafts)
    judged_by = batch.last_rows[sequence] - num_drafts[sequence] + depth
    return DraftedTokens(
        num_drafts=num_drafts,
        sequence=sequence,
        depth=depth,
        judged_by=judged_by,
        slots=slots[sequence],
        token_ids=batch.token_ids[torch.from_numpy(judged_by + 1)].to(top_ids.device),
        top_ids=top_ids,
    )
