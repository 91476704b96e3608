"""Judging by the target's own choice: a drafted token is accepted where it is the token that would be chosen.

For drafts that are point masses, and for greedy requests. Every row's token is drawn with the noise of its
position, as it would be without speculation; the draft is accepted as long as it says the same. A drafted token x
is then accepted with probability p(x), and what is emitted in its stead has the law of p without x, which is
rejection sampling (arXiv:2211.17192) against a point mass. Beyond the law, the very tokens are those of an engine
that never drafts: γ, the drafter and every cut of a draft change the time they take and nothing else.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from faser.engine.contract.plan import SequenceRows
from faser.engine.execution.sampling.sampler import NO_TOKEN, PreparedRows, Sampler, not_finite
from faser.engine.execution.verifiers.judged_rows import Bools, Ints, JudgedRows, lay_out
from faser.engine.execution.verifiers.verifier import AcceptanceResult, DraftedRows


class SampleAndMatch:
    """Couples the verdict to the choice. draft_probs must be None."""

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
        return rows.verdicts(self._sampler, prepared, last, chosen[last])

    def _choose_as_far_as_accepted(self, rows: JudgedRows, prepared: PreparedRows) -> Ints:
        """[R] chosen tokens; NO_TOKEN behind a refusal, where choosing one would be work for nothing.

        All first rows together, then the second rows of those whose first draft was accepted, and so on.
        """
        chosen, sound = np.full(len(rows.drafted), NO_TOKEN, dtype=np.int64), prepared.sound
        going = rows.first
        while len(going):
            chosen[going] = self._sampler.choose(prepared, going)
            going = going[accepted(chosen[going], rows.drafted[going], sound[going])] + 1
        return chosen


def acceptance_of_tokens(sequences: Sequence[SequenceRows], chosen: Ints) -> list[AcceptanceResult]:
    """One a sequence, where its γ + 1 last rows have chosen: [R] tokens, NO_TOKEN of logits that are no numbers.

    chosen      x_1  x_2  y | z       the drafted tokens x_1, x_2, x_3 as far as they were chosen, and the
                 first   last         first choice that is none of them: a slice of what was chosen
    """
    token_ids: list[int] = chosen.tolist()
    verdicts, first = [], 0
    for rows in sequences:
        last, num_drafts = first, rows.num_drafts
        if num_drafts:
            for drafted in rows.token_ids[-num_drafts:]:
                if token_ids[last] != drafted:
                    break
                last += 1
        if token_ids[last] == NO_TOKEN:
            position = rows.start + len(rows.token_ids) - num_drafts + last - first
            verdicts.append(AcceptanceResult(error=not_finite(position)))
        else:
            verdicts.append(AcceptanceResult(token_ids=tuple(token_ids[first : last + 1])))
        first += num_drafts + 1
    return verdicts


def accepted(chosen: Ints, drafted: Ints, sound: Bools) -> Bools:
    """[R] whether the row's drafted token is the chosen one. A row that can choose nothing accepts nothing."""
    same: Bools = (chosen == drafted) & (drafted != NO_TOKEN)
    return same & sound
