"""Block verification: a draft is judged as a whole, which accepts at least as many tokens as token by token.

Sun et al., arXiv:2403.10444, algorithm 2. Their M_b is target_probs here, M_s draft_probs; p_i is survival[i], h_i
is accept_probs[i], both after i draft tokens; X^τ is the longest prefix whose own trial succeeds, and longer
prefixes are tried although shorter ones failed. The residual is that of the prefix, not of the token: the
token-wise one would bias the output.

Because acceptance depends on tokens after the rejected one, drafting and judging these positions again needs noise
that this step has not used; see `noise.uniforms`.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from faser.engine.execution.sampling.distribution import PROB_ONE, rows_at_once
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.verifiers.judged_rows import Ints, JudgedRows
from faser.engine.execution.verifiers.rejection import Floats, Trial, residual_probs, row_totals
from faser.engine.execution.verifiers.verifier import AcceptanceResult, DraftedRows


def survivals(ratios: Floats) -> Floats:
    """[S, G + 1], the paper's p_0 … p_G.

    ratios: [S, G] target_probs / draft_probs of the draft tokens in order; 0 after the end of a draft.
    """
    found = np.ones((len(ratios), ratios.shape[1] + 1))
    for i in range(ratios.shape[1]):
        found[:, i + 1] = np.minimum(found[:, i] * ratios[:, i], 1.0)
    return found


def prefix_accept_probs(survival: Floats, residual: Floats) -> Floats:
    """The paper's h_i of a prefix with p_i = survival; any one shape.

    residual: Σ (survival * target_probs - draft_probs)+ over the vocabulary, of the row after the prefix. Where
    that row judges no token, draft_probs is 0 and residual equals survival: then h is survival. Where the residual
    is 0 a draft cannot end: a longer prefix is accepted for certain.
    """
    return np.where(residual > 0, residual / np.maximum(residual + 1.0 - survival, np.finfo(np.float64).tiny), 0.0)


def longest_accepted(accept_probs: Floats, noise: Floats) -> Ints:
    """[S] how many draft tokens are accepted, 0 … G.

    accept_probs, noise: [S, G], of the prefixes of 1 … G tokens.
    """
    succeeded = noise < accept_probs
    length = np.arange(1, accept_probs.shape[1] + 1)
    found: Ints = (succeeded * length).max(-1, initial=0).astype(np.int64)
    return found


class Block:
    """Block verification, for drafts with draft_probs; without them they count as point masses."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    @torch.inference_mode()
    def judge(
        self, logits: Tensor, sequences: Sequence[DraftedRows], draft_probs: Tensor | None
    ) -> list[AcceptanceResult]:
        trial = Trial.of(self._sampler, logits, sequences, draft_probs)
        rows = trial.rows
        survival = _row_survivals(rows, trial.target_probs, trial.draft_probs)
        accept_probs = prefix_accept_probs(survival, _residuals(trial, survival))
        noise = trial.noise.numpy(force=True)

        # A prefix is tried with the noise of its last token, which the row before the prefix's end judges.
        last = rows.first + longest_accepted(_padded(rows, accept_probs)[:, 1:], _padded(rows, noise)[:, :-1])
        return trial.acceptance_results(last, survival[last])


def _row_survivals(rows: JudgedRows, target_probs: Tensor, draft_probs: Tensor) -> Floats:
    """[R] survival of the draft tokens before each row. target_probs, draft_probs: [R] of the rows' tokens."""
    ratios = torch.where(draft_probs > 0, target_probs / draft_probs, 0.0).numpy(force=True)
    found: Floats = survivals(_padded(rows, ratios)[:, :-1])
    return found[rows.sequence, rows.depth]


def _residuals(trial: Trial, survival: Floats) -> Floats:
    """[R] Σ (survival * target_probs - draft_probs)+, in whole units of 2**-52: exact in any order."""
    fixed_probs = trial.prepared.logits
    found, step = np.empty(len(survival)), rows_at_once(fixed_probs)
    weight = torch.from_numpy(survival).to(fixed_probs.device) / row_totals(fixed_probs)
    for at in range(0, len(found), step):
        part = torch.arange(at, min(at + step, len(found)), device=fixed_probs.device)
        left = residual_probs(
            fixed_probs[part].double() * weight[part, None], trial.draft_distribution.of_rows(part)
        )
        found[at : at + step] = left.sum(-1).numpy(force=True) / PROB_ONE
    return found


def _padded(rows: JudgedRows, values: Floats | Ints) -> Floats:
    """[S, G + 1] from [R], zeros after the last row of a sequence. G: the longest draft."""
    found = np.zeros((len(rows.first), int(rows.num_drafts.max(initial=0)) + 1))
    found[rows.sequence, rows.depth] = values
    return found
