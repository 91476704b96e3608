"""SelectedDrafter: drafters of several kinds and the control plane's choice between them, as one Drafter.

For benchmarks and tests that drive a drafter without an engine. It makes StepDrafts as an engine's step does: the
text look-up drafts first, then the model for the requests for which it has more expected tokens. It learns from
commits, and never drafts overlapped.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from faser.engine.build import native_acceptance
from faser.engine.contract.drafts import DraftTable
from faser.engine.contract.plan import DraftPlan, SequenceStart
from faser.engine.control.speculation.acceptance import Acceptance, point_mass_outcomes, sampled_tokens
from faser.engine.control.speculation.policies import Fixed
from faser.engine.control.speculation.policy import Candidates, DraftingSequences, StepFacts, without_targets
from faser.engine.control.speculation.step_drafts import StepDrafts
from faser.engine.execution.drafting.drafter import Drafter, Proposals, by_slot, drafts_of
from faser.engine.execution.drafting.registry import load_index
from faser.types.arrays import Ints


class SelectedDrafter:
    """A Drafter over one that answers plans from_text as well.

    cap: most tokens of a draft; model_cap: of a draft by a model; 0: there is no model.
    """

    drafts_overlapped = False

    def __init__(self, drafter: Drafter, *, num_slots: int, cap: int, model_cap: int = 0) -> None:
        self._drafter = drafter
        self._cap = cap
        self._model_cap = model_cap
        self._policy = Fixed(cap)
        self._acceptance = Acceptance(num_slots, cap, native_acceptance(load_index))
        self._undecided: list[DraftTable] = []  # drafts of the last plan, from which the next commit teaches

    def start(self, start: SequenceStart) -> None:
        self._acceptance.start(start.slot)
        self._drafter.start(start)

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        """The chosen drafts; probs has lines for all their tokens, in their order."""
        step = self._step_drafts(replace(plan, width=self._cap, from_text=True))
        by_text = self._drafter.propose(step.plan, until)
        step.take_text(drafts_of(step.plan, by_text, 0.0, 0.0), self._acceptance, notes=False)
        model_plan = step.leave_to_model(self._model_lengths(step)) if self._model_cap else None
        proposals = Proposals(table=step.table)
        if model_plan is not None:
            by_model = self._drafter.propose(model_plan, until)
            step.take(drafts_of(model_plan, by_model, 0.0, 0.0))
            self._note(step.table.take(step.by_model))
            probs = None if by_model.probs is None else _in_order(by_model.probs, step)
            proposals = replace(by_model, table=step.table, probs=probs)
        self._undecided = [step.table, step.not_taken()]
        return proposals

    def commit(self, slots: Sequence[int], counts: Sequence[int], token_ids: Sequence[int]) -> None:
        sampled = dict(by_slot(slots, counts, token_ids))
        for drafts in self._undecided:
            if len(drafts.slots):
                tokens = sampled_tokens([sampled.get(slot, ()) for slot in drafts.slots.tolist()], self._cap)
                self._acceptance.learn(point_mass_outcomes(drafts, tokens))
        self._undecided = []
        self._drafter.commit(slots, counts, token_ids)

    def release(self, slot: int) -> None:
        self._acceptance.release(slot)
        self._undecided = [each.take(each.slots != slot) for each in self._undecided]
        self._drafter.release(slot)

    def _step_drafts(self, plan: DraftPlan) -> StepDrafts:
        """All requests as they are, of sequences of which nothing else is known."""
        count = len(plan.requests)
        lengths = np.array([each.max_tokens for each in plan.requests], dtype=np.int64)
        nothing = np.zeros(count, dtype=np.int64)
        slots = np.array([each.slot for each in plan.requests], dtype=np.int64)
        sequences = DraftingSequences(slots, *without_targets(count), nothing, nothing)
        candidates = Candidates(
            sequences,
            lengths,
            np.ones((count, self._cap + 1)),
            StepFacts(other_rows=0, kv_tokens=0, kv_sequences=count),
        )
        return StepDrafts(sequences=[], lengths=lengths, candidates=candidates, stop=plan.stop, plan=plan)

    def _model_lengths(self, step: StepDrafts) -> Ints:
        """Return the tokens [S] that the model drafts instead of text, as policies without costs say."""
        survival = self._acceptance.survival(step.candidates.slots, by_model=True)
        by_model = step.candidates.drafted(np.minimum(step.lengths, self._model_cap), survival)
        return self._policy.model_lengths(by_model, by_model.drafted(step.table.lengths, step.survival))

    def _note(self, by_model: DraftTable) -> None:
        """Tell the acceptance model which drafts a model has made."""
        if len(by_model.slots):
            lengths, survival = by_model.lengths, self._acceptance.drafted_survival(by_model)
            self._acceptance.note_drafts(by_model.slots, lengths, lengths, survival, by_model=True)


def _in_order(probs: Tensor, step: StepDrafts) -> Tensor:
    """Return probabilities [T, V] of all drafted tokens of the step, in their order. probs: of the model's.

    The others have all mass on their token.
    """
    table = step.table
    drafted = np.arange(table.width) < table.lengths[:, None]
    is_model = np.zeros(len(table.slots), dtype=np.bool_)
    is_model[step.by_model] = True
    by_model = np.broadcast_to(is_model[:, None], drafted.shape)[drafted]
    found = probs.new_zeros(len(by_model), probs.shape[1])
    certain = np.flatnonzero(~by_model)
    found[torch.from_numpy(np.flatnonzero(by_model))] = probs
    found[torch.from_numpy(certain), torch.from_numpy(table.token_ids[drafted][certain])] = 1.0
    return found
