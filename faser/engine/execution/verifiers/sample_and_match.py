"""Sample and match: a draft token is accepted where it is the token that the target samples.

For drafts that are point masses, and for greedy requests. Every row's token is sampled with the noise of its
position, as it would be without speculation; the draft is accepted up to the first token that differs. A draft
token x is then accepted with probability p(x), and the token that takes its place has the distribution p without
x, which is rejection sampling (arXiv:2211.17192) against a point mass: the maximal coupling of the two. Beyond the
distribution, the tokens themselves are those of an engine that never drafts: γ, the drafter and every shortened
draft change the time they take and nothing else. The configuration calls it `coupled`.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from faser.engine.contract.plan import SequenceRows
from faser.engine.execution.sampling.sampler import NO_TOKEN, PreparedRows, Sampler
from faser.engine.execution.verifiers.judged_rows import Bools, Ints, JudgedRows, lay_out
from faser.engine.execution.verifiers.verifier import AcceptanceResult, DraftedRows
from faser.types import SequenceError


class SampleAndMatch:
    """See Verifier. draft_probs must be None."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def judge(
        self, logits: Tensor, sequences: Sequence[DraftedRows], draft_probs: Tensor | None
    ) -> list[AcceptanceResult]:
        assert draft_probs is None, "sampled drafts are not point masses"
        rows = lay_out(sequences)
        if self._sampler.is_cheap(logits, [each.slot for each in sequences]):
            prepared, chosen = rows.sample(self._sampler, logits)
        else:
            prepared = rows.prepare(self._sampler, logits)
            chosen = self._choose_as_far_as_accepted(rows, prepared)
        last = rows.last_reached(accepted(chosen, rows.drafted, prepared.sound))
        return rows.acceptance_results(self._sampler, prepared, last, chosen[last])

    def _choose_as_far_as_accepted(self, rows: JudgedRows, prepared: PreparedRows) -> Ints:
        """[R] sampled tokens; NO_TOKEN after a rejection, where a token would not be used.

        All first rows are sampled together, then the second rows of the sequences whose first draft token was
        accepted, and so on.
        """
        chosen, sound = np.full(len(rows.drafted), NO_TOKEN, dtype=np.int64), prepared.sound
        going = rows.first
        while len(going):
            chosen[going] = self._sampler.choose(prepared, going)
            going = going[accepted(chosen[going], rows.drafted[going], sound[going])] + 1
        return chosen


def acceptance_of_tokens(sequences: Sequence[SequenceRows], chosen: Ints) -> list[AcceptanceResult]:
    """One result a sequence, from the sampled tokens of its γ + 1 last rows.

    chosen: [R], NO_TOKEN where logits are not numbers.

    drafted     x_1  x_2  x_3
    chosen      x_1  x_2  y    z      the result is the slice of `chosen` that ends with the first token
                first     last        that is not the draft token, or after the whole draft
    """
    token_ids: list[int] = chosen.tolist()
    results, first = [], 0
    for rows in sequences:
        last, num_drafts = first, rows.num_drafts
        if num_drafts:
            for drafted in rows.token_ids[-num_drafts:]:
                if token_ids[last] != drafted:
                    break
                last += 1
        if token_ids[last] == NO_TOKEN:
            results.append(AcceptanceResult(error=SequenceError.NOT_FINITE))
        else:
            results.append(AcceptanceResult(token_ids=tuple(token_ids[first : last + 1])))
        first += num_drafts + 1
    return results


def accepted(chosen: Ints, drafted: Ints, sound: Bools) -> Bools:
    """[R] whether the row's draft token is the sampled one. A row without a token accepts nothing."""
    same: Bools = (chosen == drafted) & (drafted != NO_TOKEN)
    return same & sound
