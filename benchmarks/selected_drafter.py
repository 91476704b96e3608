"""SelectedDrafter: drafters of several kinds and the control plane's choice between them, as one Drafter.

For benchmarks and tests that drive a drafter without an engine. It asks in the order of an engine's step: the text
look-up first, then the draft model for the requests that the selection leaves to it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from faser.engine.contract.plan import Draft, DraftPlan, Drafts, SequenceResult, SequenceStart, StepResult
from faser.engine.control.speculation.drafter_selection import DrafterSelection
from faser.engine.execution.drafters.drafter import Continuation, Drafter, Proposals
from faser.engine.execution.text_lookup.text_and_model import with_point_masses


class SelectedDrafter:
    """A Drafter over a drafter that answers plans from_text as well, and a selection of its own."""

    def __init__(self, drafter: Drafter, selection: DrafterSelection) -> None:
        self.selection = selection
        self._drafter = drafter

    @property
    def drafts_overlapped(self) -> bool:
        return self._drafter.drafts_overlapped

    def start(self, start: SequenceStart) -> None:
        self._drafter.start(start)

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        """The chosen drafts; probs and top_ids have lines for all their tokens, in their order."""
        answer: Drafts | DraftPlan = self.selection.first_round(plan)
        from_model = proposals = Proposals(drafts=())
        while isinstance(answer, DraftPlan):
            proposals = self._drafter.propose(answer, until)
            if not answer.from_text:
                from_model = proposals
            answer = self.selection.drafted(_drafts(plan.step, proposals))
        by_model = {draft.slot for draft in from_model.drafts}
        text = [draft for draft in answer.drafts if draft.slot not in by_model]
        return _in_order(with_point_masses(from_model, text), answer.drafts)

    def commit(self, continuations: Sequence[Continuation]) -> None:
        results = tuple(SequenceResult(slot=each.slot, token_ids=each.token_ids) for each in continuations)
        self.selection.learn(StepResult(step=0, sequences=results, run_s=0.0))
        self._drafter.commit(continuations)

    def release(self, slot: int) -> None:
        self.selection.release((slot,))
        self._drafter.release(slot)


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
        top_ids=None if proposals.top_ids is None else proposals.top_ids[order],
    )
