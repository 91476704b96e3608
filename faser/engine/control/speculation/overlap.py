"""Overlapped drafting: drafts that are made while a step verifies earlier ones.

    step        k                            k + 1
    verify      pending, chunk x_1 … x_c  |  y_1, chunk y_2 … y_m        if all of x is accepted and y_1 is right
                                          |  the recovered token         if not: its row verifies the new z_1
    draft       y_1 … y_m                 |  z_1 … z_m

A draft continues the one that is being verified as if all of it were accepted. It stands if that comes true and
its first token equals the one that the target samples next itself, the bonus token; the rest of it is then the
chunk that the next step verifies. Whether this pays is measured: a guard compares steps whose drafts were made
during steps with those whose drafts were made before them. A draft is as long as a step leaves time for.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from faser.engine.contract.drafts import FIRST_TEXT, NO_DRAFTS, Drafts, DraftTable
from faser.engine.contract.plan import StepPlan, StepResult
from faser.engine.control.speculation.acceptance import Acceptance, DraftOutcomes
from faser.engine.control.speculation.guard import Guard, GuardedStep
from faser.engine.control.speculation.policy import Candidates, Policy
from faser.engine.control.step_cost import CostModel, ErrorTracker
from faser.types.arrays import Bools, Floats, Ints
from faser.types.statistics import RoleStats

AUTO, ON, OFF = "auto", "on", "off"
_FIRST_INTERVAL = 4  # steps until the second choice of lengths, twice as many until the next
_RARE_STEPS = 8  # of a group of its guard: with lanes a change of mode costs a step
_SHORTEST = 2  # tokens of a draft: the first one says whether it stands, the others are the chunk to verify


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapOptions:
    """The lanes that drafts can be made on concurrently with steps.

    name: of the partition of the processors.
    share: of the processors that the drafter gets; 0: there are no lanes, so drafts are never overlapped.
    most_rows: of a step for which lanes have a CUDA graph; None: lanes need none.
    mode: auto: where it pays, as measured, under the policy `faser`; on: wherever a sequence may draft; off:
        never, until use_policy asks for it.
    every: steps between two choices of the sequences that draft and of the length.
    fallback: why the partition is not the one that was asked for; empty: it is.
    """

    name: str
    share: float
    most_rows: int | None = None
    mode: str = AUTO
    every: int = 32
    fallback: str = ""


@dataclass(slots=True, kw_only=True)
class OverlapOutcome:
    """The result of overlapped drafting.

    dropped: [N] tokens of each draft that the target never sees. outcomes: of the drafts that the step has decided
    about. verify_s, draft_s: what either lane should have taken. overlap_s: time in which both lanes were busy.
    """

    dropped: Ints
    outcomes: DraftOutcomes
    verify_s: float
    draft_s: float
    overlap_s: float


class Frontiers:
    """State by slot: whether it drafts overlapped, and the draft that stands, until it is taken."""

    def __init__(self, num_slots: int) -> None:
        self._standing = NO_DRAFTS
        self._drafts: Bools = np.ones(num_slots, dtype=np.bool_)

    def start(self, slot: int) -> None:
        """A sequence takes over the slot, and may draft. What the slot's last sequence drafted is dropped."""
        self._drafts[slot] = True
        self.release(slot)

    def release(self, slot: int) -> None:
        """The sequence leaves its slot."""
        if slot in self._standing.slots:
            self._standing = self._standing.take(self._standing.slots != slot)

    def choose(self, slots: Ints, chosen: Ints) -> None:
        """Let those of these slots that are at the positions `chosen` draft overlapped, and no others."""
        self._drafts[slots] = False
        self._drafts[slots[chosen]] = True

    def drafts(self, slots: Ints) -> Bools:
        """Return whether each slot drafts overlapped: [S]."""
        return self._drafts[slots]

    def learn(
        self, drafts: DraftTable, unverified: Mapping[int, tuple[int, ...]], sampled: Mapping[int, tuple[int, ...]]
    ) -> tuple[Bools, Bools]:
        """A step has verified `unverified` while these drafts were made. [S] which stand, and which are wrong.

        unverified, sampled: by slot; the step's tokens: the accepted ones and the bonus or recovered token; none
        if it sampled nothing. A draft stands if its first token was right and wrong if it was not; of one that
        continues a refused token, and of an empty one, neither is known.
        """
        stand, wrong = np.zeros((2, len(drafts.slots)), dtype=np.bool_)
        for at, slot in enumerate(drafts.slots.tolist()):
            found = sampled.get(slot, ())
            if drafts.lengths.item(at) and found and found[:-1] == unverified.get(slot, ()):
                is_right = found[-1] == drafts.token_ids.item(at, 0)
                stand[at], wrong[at] = is_right, not is_right
        self._standing = drafts.take(stand)
        return stand, wrong

    def standing(self, slots: Ints) -> tuple[Ints, DraftTable]:
        """Positions of the slots whose draft stands and has more than its first token, and these drafts."""
        by_slot = {slot: at for at, slot in enumerate(self._standing.slots.tolist())}
        pairs = [(at, by_slot[slot]) for at, slot in enumerate(slots.tolist()) if slot in by_slot]
        pairs = [(at, line) for at, line in pairs if self._standing.lengths.item(line) > 1]
        found = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return found[:, 0], self._standing.take(found[:, 1])

    def clear(self) -> None:
        """The chunks were taken, or are not wanted any more."""
        self._standing = NO_DRAFTS


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapChoice:
    """chosen: [N] positions of the sequences that draft. length: most tokens of each."""

    chosen: Ints
    length: int


class OverlapControl:
    """Decision whether drafts are made concurrently with steps, and which of them are verified.

        wants           whether the next step's drafts are made during the step before it
        ready, chunks   what of the drafts made during the last step the next step verifies
        lengths         which sequences draft meanwhile
        learn           acceptance of the new drafts' first tokens, once the step's tokens are known

    Owns that decision, and the factor between measured and predicted time of overlapped steps. frontiers: what it
    keeps by slot.
    """

    def __init__(
        self, costs: CostModel, acceptance: Acceptance, frontiers: Frontiers, options: OverlapOptions
    ) -> None:
        self._costs = costs
        self._acceptance = acceptance
        self._frontiers = frontiers
        self._options = options
        self._cycle = ErrorTracker()  # of overlapped steps
        self.reset(None)

    @property
    def has_lanes(self) -> bool:
        """Drafts may be overlapped at times."""
        return self._options.share > 0

    @property
    def is_on(self) -> bool:
        """Drafts are overlapped at present."""
        return self._choice is not None

    @property
    def share(self) -> float:
        """Return the drafter's share of the processors; 0: drafts are not overlapped."""
        return self._options.share if self.is_on else 0.0

    def stats(self) -> RoleStats:
        """Predicted and measured time of overlapped steps."""
        return self._cycle.stats("step")

    def reset(self, mode: str | None) -> None:
        """Another policy decides from now on, at first without overlapping. mode: None: the one of the options."""
        self._mode = mode or self._options.mode
        self._guard = Guard(rare_steps=_RARE_STEPS, plain_is_known=False)
        self._is_asked = False  # the guard, about the next step
        self._has_begun = False  # a step has run since drafts are overlapped
        self._choice: OverlapChoice | None = None  # None: drafts are not overlapped
        self._steps_left = 0
        self._interval = min(_FIRST_INTERVAL, self._options.every)
        self._frontiers.clear()

    def takes(self, plan: StepPlan) -> bool:
        """Return whether drafts may be made concurrently with this step.

        Not if lanes replay graphs and might have none for it: one host thread enqueues both lanes, and the draft
        would wait for hundreds of launches of the step. Steps with prompts may lack one whatever their size.
        """
        if self._choice is None:
            return False
        most_rows = self._options.most_rows
        if most_rows is None:
            return True
        return plan.num_rows == len(plan.rows) + plan.num_drafts and plan.num_rows <= most_rows

    @property
    def is_forced(self) -> bool:
        """Drafts are made during steps wherever any are wanted, whether that pays or not."""
        return self.has_lanes and self._mode == ON

    def wants(self, num_sequences: int, *, measured: bool, prompts: bool) -> bool:
        """Return whether drafts are made during the next step, of num_sequences that decode.

        measured: the guard may decide. prompts: the step computes some, and is no example of either way.
        """
        is_measured = self.has_lanes and measured and self._mode == AUTO
        self._is_asked = is_measured and not prompts
        if self._is_asked:
            return self._guard.allows(num_sequences)
        return self.is_on if is_measured else self.is_forced

    def launched(self, num_sequences: int, plain_s: float) -> GuardedStep | None:
        """The step begins. None: it is no example: the guard was not asked, or no draft is there yet.

        Arguments as in GuardedStep.
        """
        is_asked, self._is_asked = self._is_asked, False
        has_begun, self._has_begun = self._has_begun, self.is_on
        if not is_asked or has_begun != self.is_on:
            return None
        step = GuardedStep(num_sequences=num_sequences, drafts=self.is_on, plain_s=plain_s)
        self._guard.launched(step)
        return step

    def observe(self, step: GuardedStep, num_tokens: int, seconds: float) -> None:
        """The step is over. Arguments as in Guard.observe."""
        self._guard.observe(step, num_tokens, seconds)

    def is_due(self, num_steps: int) -> bool:
        """Count num_steps steps; whether it is time to choose sequences and a length, if drafts shall overlap."""
        self._steps_left -= num_steps
        return self._steps_left < 0 or (self._mode == AUTO and not self.is_on)

    def choose(self, candidates: Candidates, lengths: Ints | None) -> None:
        """Overlap drafting from now on, if any sequence may draft.

        lengths: [S] what a policy without an objective of its own wants drafted; None: as the step leaves time.
        """
        self._steps_left = self._interval
        self._interval = min(2 * self._interval, self._options.every)
        if lengths is None:
            lengths = np.minimum(candidates.limit, self._longest(candidates))
        lengths = _with_chunks(lengths)
        chosen = lengths.nonzero()[0]
        if len(chosen):
            self._choice = OverlapChoice(chosen=chosen, length=int(lengths.max()))
            self._frontiers.choose(candidates.slots, chosen)
        else:
            self.stop()

    def stop(self) -> None:
        """Drafts are made before steps again, or none are."""
        if self._choice is not None:
            self._choice = None
            self._frontiers.clear()

    def _longest(self, candidates: Candidates) -> int:
        """Return how many passes a step leaves time for, by the times that either takes alone; at least 2."""
        count = candidates.num_sequences
        step_s = self._costs.step_s(2 * count + candidates.step.other_rows, candidates.step.kv_tokens)
        return max(int(step_s / max(self._costs.pass_s(count), 1e-9)), _SHORTEST)

    def ready(self, candidates: Candidates) -> tuple[Ints, DraftTable]:
        """Positions of the candidates whose drafts stand, and these drafts, which are taken with that."""
        found = self._frontiers.standing(candidates.slots)
        self._frontiers.clear()
        return found

    def chunks(self, ready: Candidates, drafts: DraftTable, policy: Policy) -> tuple[Floats, Ints]:
        """Survival of the drafts' tokens after the first, and how many of these the next step verifies.

        ready.limit: most tokens of each chunk.
        """
        whole = self._acceptance.drafted_survival(drafts)
        survival = np.zeros_like(whole)
        survival[:, :-1] = whole[:, 1:] / np.maximum(whole[:, 1:2], 1e-12)
        limit = np.minimum(drafts.lengths - 1, ready.limit)
        kept = policy.keep(ready.drafted(limit, survival), limit)
        return survival, kept

    def lengths(self, slots: Ints, limit: Ints) -> Ints:
        """Return the tokens [S] that each slot drafts during the next step, as far as limit allows; 0: none."""
        assert self._choice is not None, "drafts are not overlapped"
        return np.where(self._frontiers.drafts(slots), _with_chunks(np.clip(limit, 0, self._choice.length)), 0)

    def learn(
        self,
        result: StepResult,
        drafts: Drafts,
        *,
        requested: Ints,
        unverified: Mapping[int, tuple[int, ...]],
        sampled: Mapping[int, tuple[int, ...]],
        verify_s: float,
    ) -> OverlapOutcome:
        """Take in an overlapped step and its drafts.

        requested: [N] tokens that were asked for. unverified, sampled: by slot, draft tokens of the step and its
        tokens. verify_s: what the step should take alone.
        """
        table = drafts.table
        lane_verify_s, lane_draft_s, overlap_s = self._note_time(result, drafts, verify_s)
        self._note(table, requested)
        stand, wrong = self._frontiers.learn(table, unverified, sampled)
        decided = (wrong | (stand & (table.lengths == 1))).nonzero()[0]  # chunks decide the others
        return OverlapOutcome(
            dropped=np.where(stand, 1, table.lengths),
            outcomes=DraftOutcomes(table.take(decided), np.ones_like(decided), stand[decided].astype(np.int64)),
            verify_s=lane_verify_s,
            draft_s=lane_draft_s,
            overlap_s=overlap_s,
        )

    def _note(self, drafts: DraftTable, requested: Ints) -> None:
        survival = self._acceptance.drafted_survival(drafts)
        for by_model in (True, False):
            those = ((drafts.methods < FIRST_TEXT) == by_model).nonzero()[0]
            if len(those):
                self._acceptance.note_drafts(
                    drafts.slots[those],
                    requested[those],
                    drafts.lengths[those],
                    survival[those],
                    by_model=by_model,
                )

    def _note_time(self, result: StepResult, drafts: Drafts, verify_s: float) -> tuple[float, float, float]:
        """Follow the measured time. Returns what either lane should have taken, and how long both were busy."""
        verified_s, drafted_s = result.began_s + result.run_s, drafts.began_s + drafts.run_s
        draft_s = self._draft_s(len(drafts.table.slots), drafts.passes)
        factor, measured_s = self._cycle.factor, max(verified_s, drafted_s) - min(result.began_s, drafts.began_s)
        self._cycle.add(max(verify_s, draft_s) * factor, measured_s)
        overlap_s = max(min(verified_s, drafted_s) - max(result.began_s, drafts.began_s), 0.0)
        return verify_s * factor, draft_s * factor, overlap_s

    def _draft_s(self, count: int, passes: int) -> float:
        """Seconds in which count sequences draft, with all processors to themselves."""
        return self._costs.text_s(count) + self._costs.pass_s(count) * passes


def _with_chunks(lengths: Ints) -> Ints:
    """These lengths, and 0 for those too short to leave a chunk to verify."""
    return np.where(lengths < _SHORTEST, 0, lengths)
