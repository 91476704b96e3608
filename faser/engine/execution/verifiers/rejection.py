"""Rejection sampling of draft tokens: each is accepted or rejected by its own two probabilities.

Leviathan et al., arXiv:2211.17192, algorithm 1. p there is target_probs here, the distribution after logits
processors, temperature and truncation; q is draft_probs, the distribution that the token was drawn from. The
functions of probabilities are the rule; they are float64 and exact to rounding, so that tests can enumerate the
distribution of the output. The final token of a sequence is

    the bonus token        after a draft that is accepted whole: drawn as without speculation, bit for bit
    the recovered token    after a rejection: drawn from the residual (p - q)+

Drafts of different lengths need no branch: the row after a draft judges a token that the drafter cannot have
drawn. It is rejected, and with draft_probs of zero its recovered token has the distribution of the target.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.execution.sampling.distribution import PROB_ONE, draw, rows_at_once
from faser.engine.execution.sampling.noise import Purpose
from faser.engine.execution.sampling.sampler import PreparedRows, Sampler
from faser.engine.execution.verifiers.draft_distribution import DraftDistribution
from faser.engine.execution.verifiers.judged_rows import Ints, JudgedRows, lay_out
from faser.engine.execution.verifiers.verifier import AcceptanceResult, DraftedRows

Floats = NDArray[np.float64]


def accept_probs(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Probability that a draft token is accepted; 0 where the drafter cannot have drawn it.

    target_probs, draft_probs: of the tokens, float64, of one shape; not written to.
    """
    return torch.where(draft_probs > 0, target_probs / draft_probs, 0.0).clamp_(max=1.0)


def residual_probs(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """(target_probs - draft_probs)+ in units of 2**-52, rounded down to whole numbers, so that sums are exact.

    target_probs, draft_probs: [N, V] float64, not written to. Returns [N, V] float64, each sum below 2**53.
    """
    return (target_probs - draft_probs).clamp_(min=0.0).mul_(PROB_ONE).floor_()


def recovered_probs(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """`residual_probs`, from which the recovered token is drawn.

    A row whose residual is empty, because the two distributions differ by rounding only, gets the target's
    distribution instead; such a row is reached with a probability of that order.
    """
    fixed_probs = residual_probs(target_probs, draft_probs)
    empty = fixed_probs.sum(-1, keepdim=True) == 0
    return torch.where(empty, (target_probs * PROB_ONE).floor_(), fixed_probs) if empty.any() else fixed_probs


class Rejection:
    """Token-wise rejection sampling, for drafts with draft_probs; without them they count as point masses."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    @torch.inference_mode()
    def judge(
        self, logits: Tensor, sequences: Sequence[DraftedRows], draft_probs: Tensor | None
    ) -> list[AcceptanceResult]:
        trial = Trial.of(self._sampler, logits, sequences, draft_probs)
        accepted = trial.noise < accept_probs(trial.target_probs, trial.draft_probs)
        last = trial.rows.last_reached(accepted.numpy(force=True))
        return trial.acceptance_results(last, np.ones(len(last)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What rejection sampling and block verification know of a step before they accept anything.

    prepared.logits: the fixed-point probabilities. target_probs, draft_probs, noise: [R] float64, of each row's
    draft token: its probability by the target and by the drafter, and the random number that decides; meaningless
    in a row that judges no token.
    """

    sampler: Sampler
    rows: JudgedRows
    prepared: PreparedRows
    draft_distribution: DraftDistribution
    target_probs: Tensor
    draft_probs: Tensor
    noise: Tensor

    @classmethod
    def of(
        cls, sampler: Sampler, logits: Tensor, sequences: Sequence[DraftedRows], draft_probs: Tensor | None
    ) -> "Trial":
        """Overwrites logits with the fixed-point probabilities. draft_probs: as in Verifier."""
        rows = lay_out(sequences)
        prepared = rows.prepare(sampler, logits)
        fixed_probs = sampler.fixed_point_probs(prepared)
        draft_distribution = DraftDistribution(rows, draft_probs, fixed_probs)
        return cls(
            sampler=sampler,
            rows=rows,
            prepared=prepared,
            draft_distribution=draft_distribution,
            target_probs=drafted_target_probs(rows, fixed_probs),
            draft_probs=draft_distribution.of_drafted(),
            noise=accept_noise(sampler, rows, prepared),
        )

    def acceptance_results(self, last: Ints, survival: Floats) -> list[AcceptanceResult]:
        """last: [S] the last row reached of each sequence. survival: as in final_tokens."""
        final_ids = final_tokens(self.sampler, self.rows, self.prepared, last, self.draft_distribution, survival)
        return self.rows.acceptance_results(self.sampler, self.prepared, last, final_ids)


def row_totals(fixed_probs: Tensor) -> Tensor:
    """[R] float64 sums, exact; 1 for a row of zeros, so that a division by it is defined."""
    return fixed_probs.sum(-1, dtype=torch.float64).clamp_(min=1.0)


def drafted_target_probs(rows: JudgedRows, fixed_probs: Tensor) -> Tensor:
    """[R] float64, the target's probability of each row's draft token; meaningless where there is none."""
    drafted = torch.from_numpy(rows.drafted).to(fixed_probs.device).clamp(min=0)
    return fixed_probs.gather(-1, drafted[:, None])[:, 0].double() / row_totals(fixed_probs)


def accept_noise(sampler: Sampler, rows: JudgedRows, prepared: PreparedRows) -> Tensor:
    """[R] float64, the random numbers that accept or reject the rows' draft tokens."""
    starts = prepared.positions[rows.first][rows.sequence]
    return sampler.noise(prepared.slots, prepared.positions, Purpose.ACCEPT, starts)


def final_tokens(
    sampler: Sampler,
    rows: JudgedRows,
    prepared: PreparedRows,
    last: Ints,
    draft_distribution: DraftDistribution,
    survival: Floats,
) -> Ints:
    """[S] the bonus or recovered token of each sequence, at the last row that it reaches.

    The residual of a recovered token is (survival * target_probs - draft_probs)+. survival: [S], 1 where tokens
    are judged one by one. prepared.logits: the fixed-point probabilities.
    """
    device = prepared.logits.device
    whole = last == rows.first + rows.num_drafts
    slots, positions = prepared.slots[last], prepared.positions[last]
    noise = torch.where(
        torch.from_numpy(whole).to(device),
        sampler.noise(slots, positions, Purpose.TOKEN),
        sampler.noise(slots, positions, Purpose.REPLACE),
    )
    final_ids = torch.zeros(len(last), dtype=torch.int64, device=device)
    step = rows_at_once(prepared.logits)
    for ended, each in ((True, np.flatnonzero(whole)), (False, np.flatnonzero(~whole))):
        for part in (torch.from_numpy(each[at : at + step]).to(device) for at in range(0, len(each), step)):
            at_rows = torch.from_numpy(last).to(device)[part]
            fixed_probs = prepared.logits[at_rows]
            if not ended:
                target_probs = fixed_probs.double() / row_totals(fixed_probs)[:, None]
                target_probs *= torch.from_numpy(survival).to(device)[part, None]
                fixed_probs = recovered_probs(target_probs, draft_distribution.of_rows(at_rows))
            final_ids[part] = draw(fixed_probs, noise[part])
    return final_ids.numpy(force=True)
