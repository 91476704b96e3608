"""Looks: all sequences that may draft look up their drafts, and only these decide.

Where drafts come from text alone a look-up costs next to nothing, so the policy is asked about drafts that are
there. Most of them are not worth a row: their survival is compared with the least price that a row can have, and
the policy cuts the others. Owns that price, which a few steps share.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np

from faser.engine.contract.drafts import Drafts, DraftTable
from faser.engine.contract.native_acceptance import Texts
from faser.engine.control.sequence import Sequence
from faser.engine.control.speculation.acceptance import Acceptance
from faser.engine.control.speculation.learning import Learning
from faser.engine.control.speculation.policy import Candidates, OtherRows, Policy
from faser.engine.control.speculation.state import Batch, SpeculationState
from faser.engine.control.speculation.statistics import MEMORY, SpeculationStatistics
from faser.engine.control.speculation.step_drafts import StepDrafts
from faser.types.arrays import Ints

_PRICED_STEPS = 4  # that look up drafts: these share a price of a row, and outcomes are learned after them
_NO_CANDIDATES = Candidates.alike(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.ones((0, 1)))

Room = Callable[[list[Sequence], list[int]], list[int]]


class Looks:
    """row_price: least survival of a draft that may be worth a row.

    texts: in which decisions look up drafts by themselves; None: plans ask the data plane for them.
    """

    def __init__(
        self,
        state: SpeculationState,
        acceptance: Acceptance,
        statistics: SpeculationStatistics,
        learning: Learning,
        texts: Texts | None,
        *,
        num_slots: int,
    ) -> None:
        self._state, self._acceptance, self._statistics = state, acceptance, statistics
        self._learning, self._texts = learning, texts
        self._unknown = np.ones((num_slots, acceptance.cap + 1))  # survival of drafts that are not there yet
        self.row_price = 0.0
        self.restart()

    def restart(self) -> None:
        """Another policy decides from now on."""
        self._priced_for = self._price_age = 0

    def look(
        self, policy: Policy, sequences: Many[Sequence], batch: Batch, limit: Ints, others: OtherRows
    ) -> StepDrafts:
        """Look up the drafts of all sequences with a limit, or have the data plane look them up."""
        count = len(limit)
        self._price_age -= 1
        is_new = self._price_age < 0 or self._priced_for != count
        if is_new:
            self._acceptance.learn_held()
            self.row_price = policy.row_price(self._candidates(batch, limit, others))
            self._priced_for, self._price_age = count, _PRICED_STEPS - 1
        at = limit.nonzero()[0] if np.count_nonzero(limit) < count else None
        slots, lengths = (batch.slots, limit) if at is None else (batch.slots[at], limit[at])
        chosen = [*sequences] if at is None else [sequences[i] for i in at.tolist()]
        step = StepDrafts(
            sequences=chosen, lengths=lengths, candidates=_NO_CANDIDATES, looks_first=True, is_new=is_new
        )
        if self._texts is None or not self._texts.are_all():
            step.candidates = self._candidates(batch, limit, others, at)
            return step
        began_s = time.perf_counter()
        columns, step.survival, num_promising = self._acceptance.native.look(
            self._texts, slots, lengths, self.row_price
        )
        run_s = time.perf_counter() - began_s
        step.is_looked, step.is_decided = True, not (num_promising or self._state.have_targets)
        if not step.is_decided:
            step.candidates = self._candidates(batch, limit, others, at)
        if is_new:
            self._learning.look_up(run_s, len(lengths))
        step.drafts = Drafts(step=0, table=DraftTable(*columns), run_s=run_s, began_s=began_s)
        step.kept = np.zeros(len(lengths), dtype=np.int64)
        return step

    def _candidates(self, batch: Batch, limit: Ints, others: OtherRows, at: Ints | None = None) -> Candidates:
        """The sequences of a batch before their drafts are there. at: positions of those to take; None: all."""
        left, survival = batch.remaining, self._unknown[: len(limit)]
        found = self._state.candidates(batch, limit, survival, others, missing_kv=left, expected=left)
        return found if at is None else found.take(at)

    def keep(self, policy: Policy, step: StepDrafts, room: Room) -> None:
        """Keep nothing of drafts that cannot be worth a row by the last price; the policy cuts the others.

        Sequences with targets may need tokens at any price.
        """
        table, candidates = step.table, step.candidates
        if not step.is_looked:
            self._learning.look_up(step.drafts.run_s, len(step.lengths))
            step.kept = np.zeros_like(table.lengths)
        may_pay = step.survival[:, 1] > self.row_price
        if np.count_nonzero(candidates.sequences.wanted_per_s):
            may_pay |= candidates.sequences.wanted_per_s > 0
        may_pay &= table.lengths > 0
        at = may_pay.nonzero()[0]
        if not len(at):
            return
        lengths = table.lengths[at]
        drafted = candidates.take(at).drafted(lengths, step.survival[at], after_s=step.drafts.run_s)
        kept = policy.keep(drafted, lengths)
        places = kept.nonzero()[0]
        if not len(places):
            return
        at, wanted = at[places], kept[places].tolist()
        fitting = np.array(room([step.sequences[i] for i in at.tolist()], wanted), dtype=np.int64)
        self._statistics.count_bypassed(MEMORY, fitting <= 0)
        step.kept[at] = fitting
