"""Overlapped drafting: drafts that are made while a step verifies earlier ones.

    step        k                            k + 1
    verify      pending, chunk x_1 … x_c  |  y_1, chunk y_2 … y_m        if all of x is accepted and y_1 is right
                                          |  the recovered token         if not: its row verifies the new z_1
    draft       y_1 … y_m                 |  z_1 … z_m

A draft continues the one that is being verified as if all of it were accepted. It stands if that comes true and
its first token equals the one that the target samples next itself, the bonus token; the rest of it is then the
chunk that the next step verifies. best_overlap says when this pays.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from faser.engine.contract.plan import Draft, Drafts, StepPlan, StepResult
from faser.engine.contract.step_times import InterferenceTable
from faser.engine.control.speculation.acceptance.draft_arrays import (
    FIRST_TEXT,
    DraftArrays,
    DraftReader,
    ReadDrafts,
)
from faser.engine.control.speculation.acceptance.estimator import Acceptance, Verdicts
from faser.engine.control.speculation.policies.draft_lengths import best_lengths
from faser.engine.control.speculation.policies.objective import Objective, best_prefixes
from faser.engine.control.speculation.policies.policy import Candidates, Floats, Ints, Policy
from faser.engine.control.step_cost import CostModel, ErrorTracker
from faser.types import RoleStats

AUTO, ON, OFF = "auto", "on", "off"
_SWITCH_ON, _STAY_ON = 1.03, 1.0  # G with overlapped drafting over the best G without
_FIRST_INTERVAL = 4  # steps until the second decision, twice as many until the next: at first little is known
_FORGET = 0.1  # of the factor of overlapped steps, at every decision that leaves overlapped drafting off


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapOptions:
    """The lanes that drafts can be made on concurrently with steps. name: of the partition of the processors.

    lanes: measured interference, one table per share; at least one. mode: auto: where it pays, by the policy's own
    objective; on: wherever a sequence may draft; off: never, until use_policy asks for it. every: steps between
    two decisions. fallback: why the partition is not the one that was asked for; empty: it is.

    most_rows: of a step for which lanes have a CUDA graph; None: lanes need none.
    """

    name: str
    lanes: tuple[InterferenceTable, ...]
    most_rows: int | None = None
    mode: str = AUTO
    every: int = 32
    fallback: str = ""


@dataclass(slots=True, kw_only=True)
class OverlapOutcome:
    """The result of overlapped drafting. Arrays: [N], one line per draft.

    dropped: tokens of each draft that the target never sees. verdicts: on the drafts that the bonus token decided.
    verify_s, draft_s: what either lane should have taken. overlap_s: time in which both lanes were busy.
    """

    slots: Ints
    methods: Ints
    dropped: Ints
    verdicts: Verdicts
    verify_s: float
    draft_s: float
    overlap_s: float


@dataclass(slots=True, kw_only=True)
class _LaunchedDrafts:
    """The drafts that are being made during the step in flight; see OverlapControl.launch."""

    slots: Ints
    lengths: Ints
    unverified: tuple[tuple[int, ...], ...]


class FirstToken(Enum):
    """What the bonus token says of an overlapped draft's first token.

    RIGHT: the rest may be a chunk. UNKNOWN: a token before it was refused, or there was no draft.
    """

    RIGHT = "right"
    WRONG = "wrong"
    UNKNOWN = "unknown"


class Frontiers:
    """By slot: whether it drafts overlapped, and the draft that stands, until it is taken."""

    def __init__(self, num_slots: int) -> None:
        self._standing: dict[int, Draft] = {}
        self._drafts: NDArray[np.bool_] = np.ones(num_slots, dtype=np.bool_)

    def start(self, slot: int) -> None:
        """A sequence takes over the slot, and may draft. What the slot's last sequence drafted is dropped."""
        self._drafts[slot] = True
        self._standing.pop(slot, None)

    def release(self, slot: int) -> None:
        """The sequence leaves its slot."""
        self._standing.pop(slot, None)

    def choose(self, slots: NDArray[np.int64], chosen: NDArray[np.int64]) -> None:
        """Of these slots those at the positions `chosen` draft overlapped."""
        self._drafts[slots] = False
        self._drafts[slots[chosen]] = True

    def drafts(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[S] whether each slot drafts overlapped."""
        return self._drafts[slots]

    def check(self, unverified: tuple[int, ...], draft: Draft, token_ids: tuple[int, ...]) -> FirstToken:
        """A step that verified `unverified` while `draft` was made has sampled token_ids.

        token_ids: the accepted ones and the bonus or recovered token; empty if the step sampled nothing.
        """
        if not draft.token_ids or not token_ids or token_ids[:-1] != unverified:
            return FirstToken.UNKNOWN
        if token_ids[-1] != draft.token_ids[0]:
            return FirstToken.WRONG
        self._standing[draft.slot] = draft
        return FirstToken.RIGHT

    def standing(self, slots: Iterable[int]) -> list[Draft | None]:
        """The draft of each slot that stands, its first token included; None: there is none."""
        return [self._standing.get(slot) for slot in slots]

    def clear(self) -> None:
        """The chunks were taken, or are not wanted any more."""
        self._standing.clear()


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

        chunks            what of the drafts made during the last step the next step verifies
        lengths, launch   which sequences draft meanwhile, and which unverified tokens their drafts continue
        learn             acceptance of the new drafts' first tokens, once the step's tokens are known

    Owns the decision whether overlapped drafting pays, with its hysteresis, and the factor between measured and
    predicted time of overlapped steps. frontiers: what it keeps by slot. cap: most tokens of a draft.
    """

    def __init__(
        self, costs: CostModel, acceptance: Acceptance, frontiers: Frontiers, options: OverlapOptions, *, cap: int
    ) -> None:
        assert options.lanes, "overlapped drafting takes lanes"
        self._costs = costs
        self._acceptance = acceptance
        self._frontiers = frontiers
        self._options = options
        self._mode = options.mode
        self._interval = min(_FIRST_INTERVAL, options.every)
        self._reader = DraftReader(cap)
        self._choice: OverlapChoice | None = None  # None: drafts are not overlapped
        self._steps_left = 0
        self._launched: _LaunchedDrafts | None = None
        self._rows = 0  # of the step that is being made
        self._context = 0.0  # mean of its sequences
        self._cycle = ErrorTracker()  # of overlapped steps

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
        num_drafts = sum([rows.num_drafts for rows in plan.rows])
        return plan.num_rows == len(plan.rows) + num_drafts and plan.num_rows <= most_rows

    def is_due(self, num_steps: int) -> bool:
        """Count num_steps steps; whether it is time to decide again."""
        self._steps_left -= num_steps
        return self._steps_left < 0

    def decide(self, candidates: Candidates, lengths: Ints | None) -> None:
        """Decide whether drafts are overlapped until the next decision.

        lengths: [S] what a policy without an objective of its own wants drafted; None: the objective decides.
        """
        self._steps_left = self._interval
        self._interval = min(2 * self._interval, self._options.every)
        choice = self._best(candidates) if lengths is None else self._as_requested(lengths)
        if choice is None:
            self._choice = None
            self._frontiers.clear()
            self._cycle.forget(_FORGET)
            return
        self._choice = choice
        self._frontiers.choose(candidates.slots, choice.chosen)

    def chunks(self, candidates: Candidates, policy: Policy) -> tuple[list[tuple[int, ...]], DraftArrays | None]:
        """What the next step verifies of each candidate's draft. candidates.limit: most tokens of each chunk."""
        drafts = self._frontiers.standing(candidates.slots.tolist())
        self._frontiers.clear()
        self._rows, self._context = len(drafts) + candidates.other_rows, candidates.mean_context
        chunks = [(i, draft) for i, draft in enumerate(drafts) if draft is not None and len(draft.token_ids) > 1]
        found: list[tuple[int, ...]] = [()] * len(drafts)
        if not chunks:
            return found, None
        positions, ready = zip(*chunks, strict=True)
        at = np.array(positions, dtype=np.int64)
        read = self._reader.read(ready)
        lengths = read.lengths
        whole = self._acceptance.drafted_survival(read.slots, read.methods, lengths, read.confidences)
        survival = np.zeros_like(whole)
        survival[:, :-1] = whole[:, 1:] / np.maximum(whole[:, 1:2], 1e-12)
        limit = np.minimum(lengths - 1, candidates.limit[at])
        kept = policy.keep(candidates.among(at).drafted(limit, survival), limit)
        self._rows += int(kept.sum())
        verified = DraftArrays(drafts=read, kept=kept, survival=survival, border=1)
        for i, draft, length in zip(positions, ready, kept.tolist(), strict=True):
            found[i] = draft.token_ids[1 : 1 + length]
        return found, verified

    def lengths(self, slots: Ints, limit: Ints) -> Ints:
        """[S] tokens that each slot drafts during the next step, as far as limit allows; 0: none."""
        assert self._choice is not None, "drafts are not overlapped"
        return np.where(self._frontiers.drafts(slots), np.clip(limit, 0, self._choice.length), 0)

    def launch(self, slots: Ints, lengths: Ints, unverified: tuple[tuple[int, ...], ...]) -> None:
        """During the step that is about to run these slots draft [N] tokens each, which continue `unverified`."""
        self._launched = _LaunchedDrafts(slots=slots, lengths=lengths, unverified=unverified)

    def learn(self, result: StepResult, drafts: Drafts, *, verify_s: float) -> OverlapOutcome:
        """Take in an overlapped step and its drafts. verify_s: what the step should take alone."""
        assert self._launched is not None, "no drafts were made during this step"
        launched, self._launched = self._launched, None
        lane_verify_s, lane_draft_s, overlap_s = self._note_time(result, drafts, verify_s)
        slots = launched.slots
        read = self._reader.read(drafts.drafts)
        methods, lengths = read.methods, read.lengths
        self._note(launched, read)
        sampled = {each.slot: each.token_ids for each in result.sequences}
        firsts = [
            self._frontiers.check(unverified, draft, sampled.get(draft.slot, ()))
            for unverified, draft in zip(launched.unverified, drafts.drafts, strict=True)
        ]
        passed = np.array([first is FirstToken.RIGHT for first in firsts])
        refused = np.array([first is FirstToken.WRONG for first in firsts])
        decided = (refused | (passed & (lengths == 1))).nonzero()[0]  # chunks decide the others
        return OverlapOutcome(
            slots=slots,
            methods=methods,
            dropped=np.where(passed, 1, lengths),
            verdicts=read.among(decided).judged(np.ones_like(decided), passed[decided].astype(np.int64)),
            verify_s=lane_verify_s,
            draft_s=lane_draft_s,
            overlap_s=overlap_s,
        )

    def _note(self, launched: _LaunchedDrafts, read: ReadDrafts) -> None:
        survival = self._acceptance.drafted_survival(read.slots, read.methods, read.lengths, read.confidences)
        for by_model in (True, False):
            those = ((read.methods < FIRST_TEXT) == by_model).nonzero()[0]
            if len(those):
                self._acceptance.note_drafts(
                    read.slots[those],
                    launched.lengths[those],
                    read.lengths[those],
                    survival[those],
                    by_model=by_model,
                )

    def _note_time(self, result: StepResult, drafts: Drafts, verify_s: float) -> tuple[float, float, float]:
        """Follow the measured time. Returns what either lane should have taken, and how long both were busy."""
        assert self._choice is not None
        lanes = self._choice.lanes
        verified_s, drafted_s = result.began_s + result.run_s, drafts.began_s + drafts.run_s
        draft_s = self._draft_s(len(drafts.drafts), drafts.passes)
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
            worth = candidates.survival[:, 1:] * candidates.weight[:, None]
            looking_s = self._costs.text_s(candidates.num_sequences) + objective.drafting_gap_s
            without = best_prefixes(objective, worth, candidates.limit, looking_s).rate
        gain = choice.rate / self._cycle.factor / max(without, objective.rate_without_drafts)
        return gain > (_STAY_ON if self._choice is not None else _SWITCH_ON)

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
    gains = np.where(may_draft[:, None], candidates.weight[:, None] * ready * (tokens - 1), -1.0)
    rows = ready * (lengths - 1)
    order = np.argsort(-gains.max(axis=1), kind="stable")[: int(may_draft.sum())]
    worth = objective.worth + gains[order].cumsum(axis=0)  # [sequences that draft, length]
    drafted = np.rint(rows[order].cumsum(axis=0)).astype(np.int64)
    verify_s, draft_s = objective.verify_s(drafted), _draft_s(costs, len(order), worth.shape[1])
    step_rows = drafted + (candidates.num_sequences + candidates.other_rows)
    context = candidates.mean_context  # other sequences are assumed to have as many tokens
    decodes = candidates.num_sequences + candidates.other_sequences
    gap_s = costs.host_gaps.drafting_s(decodes, hidden=candidates.launches_ahead, overlapped=True)
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
