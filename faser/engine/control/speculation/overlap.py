"""Overlapped drafting: drafts that are made while a step verifies earlier ones.

    step        k                            k + 1
    verify      pending, chunk x_1 … x_c  |  y_1, chunk y_2 … y_m        if all of x is accepted and y_1 is right
                                          |  the recovered token         if not: its row verifies the new z_1
    draft       y_1 … y_m                 |  z_1 … z_m

A draft continues the one that is being verified as if all of it were accepted. It stands if that comes true and
its first token equals the one that the target samples next itself, the bonus token; the rest of it is then the
chunk that the next step verifies. best_overlap says when this pays.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from faser.engine.contract.drafts import FIRST_TEXT, NO_DRAFTS, Bools, Drafts, DraftTable, Floats, Ints
from faser.engine.contract.plan import StepPlan, StepResult
from faser.engine.contract.step_times import InterferenceTable
from faser.engine.control.speculation.acceptance import Acceptance, DraftOutcomes
from faser.engine.control.speculation.draft_lengths import Objective, best_lengths, best_prefixes
from faser.engine.control.speculation.policy import Candidates, Policy
from faser.engine.control.step_cost import CostModel, ErrorTracker
from faser.types import RoleStats

AUTO, ON, OFF = "auto", "on", "off"
_SWITCH_ON, _STAY_ON = 1.03, 1.0  # G with overlapped drafting over the best G without
_FIRST_INTERVAL = 4  # steps until the second decision, twice as many until the next: at first little is known
_FORGET = 0.1  # of the factor of overlapped steps, at every decision that leaves overlapped drafting off


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapOptions:
    """The lanes that drafts can be made on concurrently with steps.

    name: of the partition of the processors.
    lanes: measured interference, one table per share; none: drafts are never overlapped.
    most_rows: of a step for which lanes have a CUDA graph; None: lanes need none.
    mode: auto: where it pays, by the policy's own objective; on: wherever a sequence may draft; off: never, until
        use_policy asks for it.
    every: steps between two decisions.
    fallback: why the partition is not the one that was asked for; empty: it is.
    """

    name: str
    lanes: tuple[InterferenceTable, ...]
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
    """By slot: whether it drafts overlapped, and the draft that stands, until it is taken."""

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
        """Of these slots those at the positions `chosen` draft overlapped."""
        self._drafts[slots] = False
        self._drafts[slots[chosen]] = True

    def drafts(self, slots: Ints) -> Bools:
        """[S] whether each slot drafts overlapped."""
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
    """chosen: [N] positions of the sequences that draft. length: most tokens of each. lanes: of the share that the
    drafter gets. rate: G, in tokens per second.
    """

    chosen: Ints
    length: int
    lanes: InterferenceTable
    rate: float


class OverlapControl:
    """Whether drafts are made concurrently with steps, and what of them is verified.

        ready, chunks   what of the drafts made during the last step the next step verifies
        lengths         which sequences draft meanwhile
        learn           acceptance of the new drafts' first tokens, once the step's tokens are known

    Owns the decision whether overlapped drafting pays, with its hysteresis, and the factor between measured and
    predicted time of overlapped steps. frontiers: what it keeps by slot.
    """

    def __init__(
        self, costs: CostModel, acceptance: Acceptance, frontiers: Frontiers, options: OverlapOptions
    ) -> None:
        self._costs = costs
        self._acceptance = acceptance
        self._frontiers = frontiers
        self._options = options
        self._mode = options.mode
        self._interval = min(_FIRST_INTERVAL, options.every)
        self._choice: OverlapChoice | None = None  # None: drafts are not overlapped
        self._steps_left = 0
        self._rows = 0  # of the step that is being made
        self._context = 0.0  # mean of its sequences
        self._cycle = ErrorTracker()  # of overlapped steps

    @property
    def has_lanes(self) -> bool:
        """Drafts may be overlapped at times."""
        return bool(self._options.lanes)

    @property
    def lanes(self) -> InterferenceTable | None:
        """The lanes in use; None: drafts are not overlapped."""
        return None if self._choice is None else self._choice.lanes

    @property
    def share(self) -> float:
        """Of the processors that the drafter has; 0: drafts are not overlapped."""
        return 0.0 if self._choice is None else self._choice.lanes.share

    def stats(self) -> RoleStats:
        """Predicted and measured time of overlapped steps."""
        return self._cycle.stats("step")

    def reset(self, mode: str | None) -> None:
        """Another policy decides from now on, at first without overlapping. mode: None: the one of the options."""
        self._mode = mode or self._options.mode
        self._choice, self._steps_left = None, 0
        self._interval = min(_FIRST_INTERVAL, self._options.every)
        self._frontiers.clear()

    def takes(self, plan: StepPlan) -> bool:
        """Whether drafts may be made concurrently with this step.

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
        return self._mode == ON

    def is_due(self, num_steps: int) -> bool:
        """Count num_steps steps; whether it is time to decide again."""
        self._steps_left -= num_steps
        return self.has_lanes and self._steps_left < 0

    def decide(self, candidates: Candidates, lengths: Ints | None) -> None:
        """Decide whether drafts are overlapped until the next decision.

        lengths: [S] what a policy without an objective of its own wants drafted; None: the objective decides.
        """
        self._steps_left = self._interval
        self._interval = min(2 * self._interval, self._options.every)
        self._choice = self._best(candidates) if lengths is None else self._as_requested(lengths)
        if self._choice is not None:
            self._frontiers.choose(candidates.slots, self._choice.chosen)
        else:
            self._frontiers.clear()
            self._cycle.forget(_FORGET)

    def ready(self, candidates: Candidates) -> tuple[Ints, DraftTable]:
        """Positions of the candidates whose drafts stand, and these drafts, which are taken with that."""
        self._rows = candidates.num_sequences + candidates.step.other_rows
        self._context = candidates.step.mean_context
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
        self._rows += int(kept.sum())
        return survival, kept

    def lengths(self, slots: Ints, limit: Ints) -> Ints:
        """[S] tokens that each slot drafts during the next step, as far as limit allows; 0: none."""
        assert self._choice is not None, "drafts are not overlapped"
        return np.where(self._frontiers.drafts(slots), np.clip(limit, 0, self._choice.length), 0)

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
        assert self._choice is not None
        lanes = self._choice.lanes
        verified_s, drafted_s = result.began_s + result.run_s, drafts.began_s + drafts.run_s
        draft_s = self._draft_s(len(drafts.table.slots), drafts.passes)
        predicted_s = lanes.one(verify_s, draft_s, rows=self._rows, context=self._context)
        verify, draft, _, _ = lanes.factors(np.array(self._rows), self._context).tolist()
        measured_s = max(verified_s, drafted_s) - min(result.began_s, drafts.began_s)
        self._cycle.add(predicted_s * self._cycle.factor, measured_s)
        overlap_s = max(min(verified_s, drafted_s) - max(result.began_s, drafts.began_s), 0.0)
        return verify_s * verify, draft_s * draft, overlap_s

    def _draft_s(self, count: int, passes: int) -> float:
        """Seconds in which count sequences draft, with all processors to themselves."""
        return self._costs.text_s(count) + self._costs.pass_s(count) * passes

    def _best(self, candidates: Candidates) -> OverlapChoice | None:
        """None where overlapping does not pay, or is off."""
        options, objective = self._options, Objective(self._costs, candidates)
        choice = best_overlap(candidates, objective, self._costs, options.lanes, most_rows=options.most_rows)
        if choice is None or self._mode == OFF:
            return None
        return choice if self._mode == ON or self._pays(choice, candidates, objective) else None

    def _pays(self, choice: OverlapChoice, candidates: Candidates, objective: Objective) -> bool:
        if self._costs.has_passes:
            without = best_lengths(candidates, objective, self._costs).rate
        else:
            looking_s = self._costs.text_s(candidates.num_sequences) + objective.drafting_gap_s
            without = best_prefixes(objective, candidates.survival, candidates.limit, looking_s).rate
        gain = choice.rate / self._cycle.factor / max(without, objective.rate_without_drafts)
        return gain > (_STAY_ON if self.lanes is not None else _SWITCH_ON)

    def _as_requested(self, lengths: Ints) -> OverlapChoice | None:
        """Every sequence for which a policy wants drafts, as long as the longest of them."""
        chosen = lengths.nonzero()[0]
        if not len(chosen) or self._mode != ON:
            return None
        return OverlapChoice(chosen=chosen, length=int(lengths.max()), lanes=self._options.lanes[-1], rate=0.0)


def best_overlap(
    candidates: Candidates,
    objective: Objective,
    costs: CostModel,
    lanes: tuple[InterferenceTable, ...],
    *,
    most_rows: int | None = None,
) -> OverlapChoice | None:
    """The share, the common length and the sequences with the largest G; those that gain most are chosen first.

    A sequence is ready if it has a chunk. Let s_k be the survival of a draft's first k tokens: the sequence
    becomes ready with probability s_1 and stays ready with s_m, so it is ready in π = s_1 / (1 + s_1 - s_m) of the
    steps. A ready step has (s_1 + … + s_m) / s_1 tokens, any other step one. For a constant acceptance this is
    PEARL's expectation with a pre-verified row (arXiv 2408.11850). G is these tokens over the time that both lanes
    take together.

    most_rows: of an overlapped step, prompts aside; None: any number. Returns None where nothing can be drafted.
    """
    may_draft = candidates.limit > 0
    if not lanes or not may_draft.any():
        return None
    lengths = np.minimum(np.arange(1, candidates.survival.shape[1]), np.maximum(candidates.limit, 1)[:, None])
    ready, tokens = (np.take_along_axis(each, lengths - 1, axis=1) for each in expected(candidates.survival))
    gains = np.where(may_draft[:, None], ready * (tokens - 1), -1.0)
    rows = ready * (lengths - 1)
    order = np.argsort(-gains.max(axis=1), kind="stable")[: int(may_draft.sum())]
    worth = objective.worth + gains[order].cumsum(axis=0)  # [sequences that draft, length]
    drafted = np.rint(rows[order].cumsum(axis=0)).astype(np.int64)
    verify_s, draft_s = objective.verify_s(drafted), _draft_s(costs, len(order), worth.shape[1])
    step_rows = drafted + (candidates.num_sequences + candidates.step.other_rows)
    context = candidates.step.mean_context  # other sequences are assumed to have as many tokens
    decodes = candidates.num_sequences + candidates.step.other_sequences
    gap_s = costs.posterior.host_s(decodes)
    rates = np.stack([worth / (each.seconds(verify_s, draft_s, step_rows, context) + gap_s) for each in lanes])
    if most_rows is not None:
        rates[:, drafted + decodes > most_rows] = 0.0
        if not rates.any():
            return None
    best, count, length = (int(each) for each in np.unravel_index(int(rates.argmax()), rates.shape))
    return OverlapChoice(
        chosen=np.sort(order[: count + 1]),
        length=length + 1,
        lanes=lanes[best],
        rate=float(rates[best, count, length]),
    )


def expected(survival: Floats) -> tuple[Floats, Floats]:
    """Share of steps in which a sequence is ready, and tokens of such a step: [S, K] each, by draft length.

    survival: [S, K + 1], column 0 is 1.
    """
    first = survival[:, 1:2]
    ready = first / (1 + first - survival[:, 1:])
    tokens = survival[:, 1:].cumsum(axis=1) / np.maximum(first, 1e-12)
    return ready, np.maximum(tokens, 1.0)


def _draft_s(costs: CostModel, num_sequences: int, most: int) -> Floats:
    """[num_sequences, most] seconds in which 1 … num_sequences sequences draft 1 … most tokens each."""
    counts = np.arange(1, num_sequences + 1)
    found: Floats = costs.text_s(counts)[:, None] + costs.pass_s(counts)[:, None] * np.arange(1, most + 1)
    return found
