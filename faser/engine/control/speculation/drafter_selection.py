"""DrafterSelection: the two rounds of drafting in an engine of method `auto`, and the choice between text drafts.

The text look-up costs next to nothing, so it answers first, with a draft of every method for every request. Of
these a sequence gets the one with the most expected tokens. Where there is a draft model too, the policy then says
for which sequences that model drafts instead:

    DraftPlan (from_text) ──▶ Drafts: a draft per request and method ──▶ one text draft for each request
    DraftPlan (requests left to the model, if any) ──▶ Drafts ──▶ one draft for every request

Owns the round between the two. What drafters are worth is in Acceptance; a text draft that is not chosen teaches
it too, since it can be compared with the tokens that came anyway. Motivation: arXiv 2601.11580, which finds more
to win in the choice of the drafter than in the length of the draft.

The choice depends on committed tokens alone, so it leaves the distribution of the output as it is; and where
drafts are point masses, as drafts from text always are, it changes no token either.
"""

from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from faser.engine.contract.plan import Draft, DraftPlan, Drafts, StopRule
from faser.engine.control.speculation.acceptance.draft_arrays import DraftReader, ReadDrafts
from faser.engine.control.speculation.acceptance.estimator import Acceptance

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_token_ids = attrgetter("token_ids")


@dataclass(slots=True, kw_only=True)
class TextRound:
    """The text look-up's answer to a plan, one draft for each of its S requests.

    lengths: [S]. survival: [S, K + 1] of these drafts. others: the drafts that were not chosen; None: there are
    none.
    """

    plan: DraftPlan
    looked_up: Drafts
    drafts: tuple[Draft, ...]
    lengths: Ints
    survival: Floats
    others: ReadDrafts | None


class DrafterSelection:
    """acceptance: what drafts are worth, only to be read. has_model: the policy may leave requests to a model."""

    def __init__(self, acceptance: Acceptance, *, has_model: bool) -> None:
        self.has_model = has_model
        self._acceptance = acceptance
        self._reader = DraftReader(acceptance.cap)
        self._plan: DraftPlan | None = None  # the plan whose text drafts are being looked up
        self._round: TextRound | None = None  # the round that waits for the model's drafts
        self._modelled: tuple[int, ...] = ()  # positions of the requests that the model drafts for

    @property
    def waits_for_model(self) -> bool:
        return self._round is not None

    def first_round(self, plan: DraftPlan) -> DraftPlan:
        """The plan that goes out first: the same requests, for the text look-up."""
        self._plan = plan
        return replace(plan, from_text=True)

    def choose_text(self, looked_up: Drafts) -> TextRound:
        """The best draft from text for each request of the plan that went out."""
        assert self._plan is not None, "drafts come exactly when they were asked for"
        plan, self._plan = self._plan, None
        count, drafts = len(plan.requests), looked_up.drafts
        if not any(map(_token_ids, drafts)):
            survival = np.zeros((count, self._acceptance.cap + 1))
            survival[:, 0] = 1.0
            return TextRound(
                plan=plan,
                looked_up=looked_up,
                drafts=drafts[:count],
                lengths=np.zeros(count, dtype=np.int64),
                survival=survival,
                others=None,
            )
        read = self._reader.read(drafts)
        survival = self._acceptance.drafted_survival(read.slots, read.methods, read.lengths, read.confidences)
        values = np.add.reduce(survival, axis=1).reshape(-1, count)
        chosen = values.argmax(axis=0) * count + np.arange(count)
        not_chosen = read.lengths > 0
        not_chosen[chosen] = False
        return TextRound(
            plan=plan,
            looked_up=looked_up,
            drafts=tuple([drafts[i] for i in chosen.tolist()]),
            lengths=read.lengths[chosen],
            survival=survival[chosen],
            others=read.among(not_chosen.nonzero()[0]) if np.count_nonzero(not_chosen) else None,
        )

    def leave_to_model(self, found: TextRound, lengths: Ints, stop: StopRule | None) -> DraftPlan | None:
        """The plan for the requests that the model drafts for; None: all drafts are from text.

        lengths: [S] tokens; 0: the text draft stays. While a step runs (the plan has a share) the model's plan
        follows always, without requests if all drafts are from text: the step's lanes are divided already.
        """
        self._modelled = tuple(lengths.nonzero()[0].tolist())
        if not self._modelled and found.plan.share is None:
            return None
        self._round = found
        requests = [
            replace(found.plan.requests[i], max_tokens=lengths.item(i), new_blocks=()) for i in self._modelled
        ]
        return replace(found.plan, requests=tuple(requests), released=(), stop=stop)

    def complete(self, from_model: Drafts) -> Drafts:
        """One draft for every request; times and passes are those of both rounds."""
        assert self._round is not None
        found, self._round = self._round, None
        drafts = [*found.drafts]
        for i, draft in zip(self._modelled, from_model.drafts, strict=True):
            drafts[i] = draft
        return replace(
            found.looked_up,
            drafts=tuple(drafts),
            run_s=found.looked_up.run_s + from_model.run_s,
            passes=from_model.passes,
            catchup_tokens=from_model.catchup_tokens,
        )
