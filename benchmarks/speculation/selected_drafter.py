"""SelectedDrafter: drafters of several kinds and the control plane's choice between them, as one Drafter.

For benchmarks and tests that drive a drafter without an engine. It asks in the order of an engine's step: the text
look-up first, then the draft model for the requests for which it has more expected tokens. It learns from commits,
and never drafts overlapped.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from faser.engine.contract.drafts import Drafts
from faser.engine.contract.plan import Draft, DraftPlan, SequenceStart
from faser.engine.control.speculation.acceptance import Acceptance, DraftReader, ReadDrafts, came_tokens
from faser.engine.control.speculation.control import DrafterSelection, TextRound
from faser.engine.control.speculation.policies import Fixed
from faser.engine.control.speculation.policy import Candidates, Ints
from faser.engine.execution.drafting.drafter import Continuation, Drafter, Proposals, with_point_masses


class SelectedDrafter:
    """A Drafter over one that answers plans from_text as well.

    cap: most tokens of a draft; model_cap: of a draft by a model; 0: there is no model.
    """

    drafts_overlapped = False

    def __init__(self, drafter: Drafter, *, num_slots: int, cap: int, model_cap: int = 0) -> None:
        self._drafter = drafter
        self._model_cap = model_cap
        self._policy = Fixed(cap)
        self._acceptance = Acceptance(num_slots, cap)
        self._selection = DrafterSelection(self._acceptance, has_model=model_cap > 0)
        self._reader = DraftReader(cap)
        self._cap = cap
        self._unjudged: list[ReadDrafts] = []  # drafts of the last plan, from which the next commit teaches

    def start(self, start: SequenceStart) -> None:
        self._acceptance.start(start.slot)
        self._drafter.start(start)

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        """The chosen drafts; probs has lines for all their tokens, in their order."""
        by_text = self._drafter.propose(self._selection.first_round(plan), until)
        found = self._selection.choose_text(_drafts(plan.step, by_text))
        lengths = self._model_lengths(found)
        model_plan = self._selection.leave_to_model(found, lengths, plan.stop)
        if model_plan is None:
            proposals = Proposals(drafts=found.drafts)
        else:
            by_model = self._drafter.propose(model_plan, until)
            drafts = self._selection.complete(_drafts(plan.step, by_model)).drafts
            text = [found.drafts[i] for i in (lengths == 0).nonzero()[0].tolist()]
            proposals = _in_order(with_point_masses(by_model, text), drafts)
        self._note(found, lengths, proposals)
        return proposals

    def commit(self, continuations: Sequence[Continuation]) -> None:
        came = {each.slot: each.token_ids for each in continuations}
        for drafts in self._unjudged:
            if len(drafts.slots):
                tokens = came_tokens([came.get(slot, ()) for slot in drafts.slots.tolist()], self._cap)
                self._acceptance.learn(drafts.verdicts(tokens))
        self._unjudged = []
        self._drafter.commit(continuations)

    def release(self, slot: int) -> None:
        self._acceptance.release(slot)
        self._unjudged = [each.among((each.slots != slot).nonzero()[0]) for each in self._unjudged]
        self._drafter.release(slot)

    def _model_lengths(self, found: TextRound) -> Ints:
        """[S] tokens that the model drafts in place of a draft from text, as policies without costs say."""
        requests = found.plan.requests
        slots = np.array([each.slot for each in requests], dtype=np.int64)
        candidates = Candidates(
            slots=slots,
            limit=np.minimum([each.max_tokens for each in requests], self._model_cap),
            survival=self._acceptance.survival(slots, by_model=True),
            weight=np.ones(len(slots)),
            missing_kv=np.zeros_like(slots),
            other_rows=0,
            kv_tokens=0,
        )
        return self._policy.model_lengths(candidates, candidates.drafted(found.lengths, found.survival))

    def _note(self, found: TextRound, lengths: Ints, proposals: Proposals) -> None:
        """Tell the acceptance model what drafts came, and keep them until their tokens come."""
        by_model = (lengths > 0).nonzero()[0]
        if len(by_model):
            read = self._reader.read([proposals.drafts[i] for i in by_model.tolist()])
            survival = self._acceptance.drafted_survival(read.slots, read.methods, read.lengths, read.confidences)
            self._acceptance.note_drafts(read.slots, read.lengths, read.lengths, survival, by_model=True)
        others = found.not_taken(lengths)
        self._unjudged = [self._reader.read(proposals.drafts), *([] if others is None else [others])]


def _drafts(step: int, proposals: Proposals) -> Drafts:
    return Drafts(
        step=step,
        drafts=proposals.drafts,
        run_s=0.0,
        passes=proposals.passes,
        catchup_tokens=proposals.catchup_tokens,
        drawn=proposals.probs is not None,
    )


def _in_order(proposals: Proposals, drafts: tuple[Draft, ...]) -> Proposals:
    """proposals with its drafts, and the lines of their tokens, in the order of drafts."""
    lines: dict[int, range] = {}
    total = 0
    for draft in proposals.drafts:
        lines[draft.slot] = range(total, total := total + len(draft.token_ids))
    order = [line for draft in drafts for line in lines[draft.slot]]
    return replace(
        proposals,
        drafts=drafts,
        probs=None if proposals.probs is None else proposals.probs[order],
    )
