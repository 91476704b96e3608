"""StepDrafts: the drafts of one step, from the decision to draft until the step has verified them.

SpeculationControl.decide makes it, the scheduler passes it on, and `learn` consumes it. It estimates nothing.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from faser.engine.contract.drafts import NO_DRAFTS, Drafts, DraftTable
from faser.engine.contract.native_acceptance import SampledStep
from faser.engine.contract.plan import DraftPlan, StopRule
from faser.engine.control.sequence import Sequence
from faser.engine.control.speculation.acceptance import Acceptance
from faser.engine.control.speculation.policy import Candidates
from faser.types.arrays import Floats, Ints

_NO_INTS: Ints = np.zeros(0, dtype=np.int64)
_NO_SURVIVAL: Floats = np.zeros((0, 1))
_NO_PLAN = DraftPlan(step=0, width=0, requests=())
_NOT_THERE = Drafts(step=0, table=NO_DRAFTS, run_s=0.0)


@dataclass(slots=True, kw_only=True)
class StepDrafts:
    """Drafts of one step, from the decision to what was verified: see the module.

    S sequences draft. By the decision:
    sequences: which these are.
    lengths: [S] tokens that each is asked for, at least 1.
    candidates: these sequences as the policy saw them.
    stop: when a model's drafts end sooner.
    is_new: the decision was made for this step; else a cached one serves it.
    is_drawn: tokens are drawn from probabilities; else each is a point mass.
    share: of the processors that drafting gets during a step; 0: drafts are made before their step.
    num_decided: leading tokens of each draft that the step before has accepted already: 1 for chunks.
    is_unread: they were launched ahead, and their tokens come with the result of the step. at: then, [S] which of
        the drafts asked for they are: the sequences of the others have ended meanwhile.
    looks_first: nothing was decided but to look; blocks and the cut follow once the drafts are there.
    is_looked: they are there already, and native code holds those that were not taken. is_decided: none is kept.

    Once the drafts are there:
    plan: the one that went out last.
    drafts: the answers to it, as far as they are final.
    from_text: all drafts from text, and taken: [S] the positions of those that were taken; by_model: [M] the
        sequences that the model drafts for instead.
    survival: [S, K + 1] of the tokens that may be verified.
    kept: [S] tokens that are verified.
    """

    sequences: list[Sequence]
    lengths: Ints
    candidates: Candidates
    stop: StopRule | None = None
    is_new: bool = True
    is_drawn: bool = False
    share: float = 0.0
    num_decided: int = 0
    is_unread: bool = False
    at: Ints = field(default_factory=lambda: _NO_INTS)
    looks_first: bool = False
    is_looked: bool = False
    is_decided: bool = False
    plan: DraftPlan = _NO_PLAN
    drafts: Drafts = _NOT_THERE
    from_text: DraftTable = NO_DRAFTS
    taken: Ints = field(default_factory=lambda: _NO_INTS)
    by_model: Ints = field(default_factory=lambda: _NO_INTS)
    survival: Floats = field(default_factory=lambda: _NO_SURVIVAL)
    kept: Ints = field(default_factory=lambda: _NO_INTS)

    @property
    def table(self) -> DraftTable:
        """Return the table [S] with one draft for each sequence."""
        return self.drafts.table

    @property
    def has_drafts(self) -> bool:
        """A drafter has found a token, or passes were made for one."""
        return bool(self.drafts.passes) or bool(np.count_nonzero(self.table.lengths))

    def narrow(self, at: Ints) -> None:
        """Keep the drafts of these sequences: the others have ended since the decision."""
        self.at, self.sequences = at, [self.sequences[i] for i in at.tolist()]
        self.lengths, self.candidates = self.lengths[at], self.candidates.take(at)

    def take_text(self, answer: Drafts, acceptance: Acceptance, *, notes: bool, row_price: float = 0.0) -> None:
        """Take for each sequence the draft from text that is worth most beyond the price of its rows.

        notes: the estimates take down what the look-ups have found. row_price: tokens that a row has to bring.
        """
        requested = self.lengths if notes else None
        self.taken, table, self.survival = acceptance.choose(answer.table, len(self.lengths), requested, row_price)
        if np.count_nonzero(answer.table.lengths):
            self.from_text = answer.table
        self.drafts = Drafts(step=answer.step, table=table, run_s=answer.run_s, began_s=answer.began_s)

    def leave_to_model(self, lengths: Ints) -> DraftPlan | None:
        """The plan for the sequences that the model drafts for; None: all drafts are from text.

        lengths: [S] tokens; 0: the draft from text stays. While a step runs the model's plan follows always: the
        step's lanes are divided already.
        """
        self.by_model = lengths.nonzero()[0]
        if not len(self.by_model) and not self.share:
            return None
        requests = [
            self.plan.requests[i]._replace(max_tokens=lengths.item(i), new_blocks=())
            for i in self.by_model.tolist()
        ]
        self.plan = replace(self.plan, requests=tuple(requests), released=(), from_text=False, stop=self.stop)
        return self.plan

    def take(self, answer: Drafts) -> None:
        """All drafts, or those of the model in place of the ones from text."""
        if not len(self.taken):
            self.drafts = answer
            return
        text = self.drafts
        if len(self.by_model):
            for column, of_model in zip(text.table, answer.table, strict=True):
                column[self.by_model] = of_model
        self.drafts = replace(
            text,
            run_s=text.run_s + answer.run_s,
            passes=answer.passes,
            catchup_tokens=answer.catchup_tokens,
        )

    def take_unread(self, answer: Drafts) -> None:
        """The drafts that were launched ahead have come, those of sequences that ended meanwhile as well."""
        self.drafts = replace(answer, table=answer.table.take(self.at))

    def verified(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return the draft tokens that the step verifies, if any, each with its index in sequences."""
        first, verifying = self.num_decided, self.kept.nonzero()[0]
        if not len(verifying):
            return []
        rows = self.table.token_ids[verifying, first:].tolist()
        columns = zip(verifying.tolist(), rows, self.kept.take(verifying).tolist(), strict=True)
        return [(at, tuple(row[:count])) for at, row, count in columns]

    def judge(self, acceptance: Acceptance, sampled: SampledStep, num_cut: Ints | None = None) -> Ints:
        """The estimates hold what the step says about these drafts, and about those not taken.

        num_cut: [S] kept tokens that the step gave up. Returns how many of the others it accepted, [S], -1 where
        it teaches nothing.
        """
        kept = self.kept if num_cut is None else self.kept - num_cut
        if self.is_looked:
            return acceptance.native.judge_look(sampled, self.table, kept)
        return acceptance.native.judge(
            sampled,
            self.table,
            kept,
            self.from_text,
            self.taken,
            self.by_model,
            num_decided=self.num_decided,
            is_drawn=self.is_drawn,
        )

    def not_taken(self) -> DraftTable:
        """The drafts from text in whose place another one was taken."""
        others = self.from_text.lengths > 0
        if len(others):
            taken = np.ones(len(self.taken), dtype=np.bool_)
            taken[self.by_model] = False
            others[self.taken[taken]] = False
        return self.from_text.take(others) if np.count_nonzero(others) else NO_DRAFTS
