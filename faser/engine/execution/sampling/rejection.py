"""Rejection sampling: each draft token is accepted or rejected by its two probabilities, or a draft as a whole.

Leviathan et al., arXiv:2211.17192, algorithm 1. p there is target_probs here, the distribution after logits
processors, temperature and truncation; q is draft_probs, the distribution that the token was drawn from. The
functions of probabilities are the rule; they are float64 and exact to rounding, so that tests can enumerate the
distribution of the output. The final token of a sequence is

    the bonus token        after a draft that is accepted whole: drawn as without speculation, bit for bit
    the recovered token    after a rejection: drawn from the residual (p - q)+

Drafts of different lengths need no branch: the row after a draft verifies a token that the drafter cannot have
drawn. It is rejected, and with draft_probs of zero its recovered token has the distribution of the target.

Block verification (Sun et al., arXiv:2403.10444, algorithm 2) accepts at least as many tokens. Their M_b is
target_probs here, M_s draft_probs; p_i is survival[i], h_i is accept_probs[i], both after i draft tokens; X^τ is
the longest prefix whose own trial succeeds, and longer prefixes are tried although shorter ones failed. The
residual is that of the prefix, not of the token: the token-wise one would bias the output. Because acceptance
depends on tokens after the rejected one, drafting and verifying these positions again needs noise that this step
has not used; see `noise_words`.
"""

import numpy as np
import torch
from torch import Tensor

from faser.engine.execution.sampling.distribution import PROB_ONE, draw, parts, rows_at_once
from faser.engine.execution.sampling.parameters import Purpose
from faser.engine.execution.sampling.rows import DraftLayout, LogitRows, StepTokens
from faser.engine.execution.sampling.sampler import Sampler
from faser.types.arrays import Floats, Ints


class Rejection:
    """Token-wise rejection sampling, for drafts with draft_probs; without them they count as point masses."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    @torch.inference_mode()
    def verify(self, logits: Tensor, layout: DraftLayout, draft_probs: Tensor | None) -> StepTokens:
        trial = Trial(self._sampler.rows(logits, layout), draft_probs)
        accepted = trial.noise < accept_probs(trial.target_probs, trial.draft_probs)
        last = trial.layout.last_reached(accepted.numpy(force=True))
        return trial.results(last, np.ones(len(last)))


class Block:
    """Block verification, for drafts with draft_probs; without them they count as point masses."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    @torch.inference_mode()
    def verify(self, logits: Tensor, layout: DraftLayout, draft_probs: Tensor | None) -> StepTokens:
        trial = Trial(self._sampler.rows(logits, layout), draft_probs)
        layout, noise = trial.layout, trial.noise.numpy(force=True)
        ratios = torch.where(trial.draft_probs > 0, trial.target_probs / trial.draft_probs, 0.0)
        survival = survivals(_padded(layout, ratios.numpy(force=True))[:, :-1])[layout.sequence, layout.depth]
        found = prefix_accept_probs(survival, trial.residuals(survival))
        # A prefix is tried with the noise of its last token, which the row before the prefix's end verifies.
        last = layout.first + longest_accepted(_padded(layout, found)[:, 1:], _padded(layout, noise)[:, :-1])
        return trial.results(last, survival[last])


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


def survivals(ratios: Floats) -> Floats:
    """Return the paper's p_0 … p_G: [S, G + 1].

    ratios: [S, G] target_probs / draft_probs of the draft tokens in order; 0 after the end of a draft.
    """
    found = np.ones((len(ratios), ratios.shape[1] + 1))
    for i in range(ratios.shape[1]):
        found[:, i + 1] = np.minimum(found[:, i] * ratios[:, i], 1.0)
    return found


def prefix_accept_probs(survival: Floats, residual: Floats) -> Floats:
    """The paper's h_i of a prefix with p_i = survival; any one shape.

    residual: Σ (survival * target_probs - draft_probs)+ over the vocabulary, of the row after the prefix. Where
    that row verifies no token, draft_probs is 0 and residual equals survival: then h is survival. Where the
    residual is 0 a draft cannot end: a longer prefix is accepted for certain.
    """
    return np.where(residual > 0, residual / np.maximum(residual + 1.0 - survival, np.finfo(np.float64).tiny), 0.0)


def longest_accepted(accept_probs: Floats, noise: Floats) -> Ints:
    """Return how many draft tokens are accepted, 0 … G: [S].

    accept_probs, noise: [S, G], of the prefixes of 1 … G tokens.
    """
    succeeded = noise < accept_probs
    length = np.arange(1, accept_probs.shape[1] + 1)
    found: Ints = (succeeded * length).max(-1, initial=0).astype(np.int64)
    return found


def row_totals(fixed_probs: Tensor) -> Tensor:
    """Return the rows' sums [R] float64, exact; 1 for a row of zeros, so that a division by it is defined."""
    return fixed_probs.sum(-1, dtype=torch.float64).clamp_(min=1.0)


class DraftDistribution:
    """Distribution of the draft token of each row of a step. A row that verifies no token has zeros.

    Point masses are written out only for the rows that are asked for, never for a whole step.

    probs: [T, V] float64, of the draft tokens; None: each is a point mass. like: a tensor [R, V] on the device of
    the results.
    """

    def __init__(self, layout: DraftLayout, probs: Tensor | None, like: Tensor) -> None:
        self._drafted = torch.from_numpy(layout.drafted).to(like.device)
        self._verifying = torch.from_numpy(layout.verifying).to(like.device)
        self._probs = probs
        self._line = torch.full_like(self._drafted, -1)  # of probs, by row
        self._line[self._verifying] = torch.arange(len(self._verifying), device=like.device)
        self._width = like.shape[-1]

    def of_drafted(self) -> Tensor:
        """Return the probability [R] float64 of each row's draft token; 0 where there is none."""
        found = torch.zeros(len(self._drafted), dtype=torch.float64, device=self._drafted.device)
        found[self._verifying] = 1.0
        if self._probs is not None:
            found[self._verifying] = self._probs.gather(-1, self._drafted[self._verifying, None])[:, 0]
        return found

    def of_rows(self, rows: Tensor) -> Tensor:
        """Return the distributions [len(rows), V] float64; zeros for a row that verifies no token."""
        found = torch.zeros(len(rows), self._width, dtype=torch.float64, device=rows.device)
        line = self._line[rows]
        verifying = (line >= 0).nonzero()[:, 0]
        if self._probs is None:
            found[verifying, self._drafted[rows[verifying]]] = 1.0
        else:
            found[verifying] = self._probs[line[verifying]]
        return found


class Trial:
    """State of a step before anything is accepted, common to both rules.

    fixed_probs: [R, V] float32, the target's probabilities as whole numbers, in place of the logits.
    draft_distribution: of each row's draft token.
    target_probs, draft_probs, noise: [R] float64, of each row's draft token: its probability by the target and by
        the drafter, and the random number that decides; meaningless in a row that verifies no token.
    """

    def __init__(self, rows: LogitRows, draft_probs: Tensor | None) -> None:
        self._rows = rows
        self.layout = rows.layout
        self.fixed_probs = rows.probabilities()
        self.draft_distribution = DraftDistribution(rows.layout, draft_probs, self.fixed_probs)
        drafted = torch.from_numpy(rows.layout.drafted).to(self.fixed_probs.device).clamp(min=0)
        masses = self.fixed_probs.gather(-1, drafted[:, None])[:, 0].double()
        self.target_probs = masses / row_totals(self.fixed_probs)
        self.draft_probs = self.draft_distribution.of_drafted()
        self.noise = rows.accept_noise()

    def residuals(self, survival: Floats) -> Floats:
        """Return Σ (survival * target_probs - draft_probs)+ [R], in whole units of 2**-52: exact in any order.

        A row without a token has all its mass on the error, which no drafter proposes. Were its residual 0, the
        prefix before it could not end a draft, and shorter ones would take its place in the answer.
        """
        found, device = np.empty(len(survival)), self.fixed_probs.device
        weight = torch.from_numpy(survival).to(device) / row_totals(self.fixed_probs)
        for part in parts(len(found), rows_at_once(self.fixed_probs)):
            rows = torch.arange(part.start, part.stop, device=device)
            target_probs = self.fixed_probs[rows].double() * weight[rows, None]
            left = residual_probs(target_probs, self.draft_distribution.of_rows(rows))
            found[part] = left.sum(-1).numpy(force=True) / PROB_ONE
        return np.where(self._rows.lacking, survival, found)

    def results(self, last: Ints, survival: Floats) -> StepTokens:
        """last: [S] the last row reached of each sequence. survival: as in _final_tokens."""
        return self._rows.results(last, self._final_tokens(last, survival))

    def _final_tokens(self, last: Ints, survival: Floats) -> Ints:
        """Return the bonus or recovered token [S] of each sequence, at the last row that it reaches.

        The residual of a recovered token is (survival * target_probs - draft_probs)+. survival: [S], 1 where
        tokens are verified one by one.
        """
        device = self.fixed_probs.device
        whole = last == self.layout.first + self.layout.num_drafts
        final_ids = torch.zeros(len(last), dtype=torch.int64, device=device)
        step = rows_at_once(self.fixed_probs)
        for purpose, each in ((Purpose.TOKEN, np.flatnonzero(whole)), (Purpose.REPLACE, np.flatnonzero(~whole))):
            for some in (each[at] for at in parts(len(each), step)):
                part = torch.from_numpy(some).to(device)
                at_rows = torch.from_numpy(last).to(device)[part]
                fixed_probs = self.fixed_probs[at_rows]
                if purpose is Purpose.REPLACE:
                    target_probs = fixed_probs.double() / row_totals(fixed_probs)[:, None]
                    target_probs *= torch.from_numpy(survival).to(device)[part, None]
                    fixed_probs = recovered_probs(target_probs, self.draft_distribution.of_rows(at_rows))
                final_ids[part] = draw(fixed_probs, self._rows.arrivals(last[some], purpose))
        return final_ids.numpy(force=True)


def _padded(layout: DraftLayout, values: Floats) -> Floats:
    """Pad values [R] to [S, G + 1], zeros after the last row of a sequence. G: the longest draft."""
    found = np.zeros((len(layout.first), int(layout.num_drafts.max(initial=0)) + 1))
    found[layout.sequence, layout.depth] = values
    return found
