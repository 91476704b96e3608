"""Drafting beside verification: whether it is done, who drafts ahead, and what the next step verifies of it.

Owns the frontiers, the standing decision with its hysteresis, and the time that overlapped steps took against what
was predicted. Asks the acceptance and the cost model what is to be expected and teaches them what came of it.
Knows slots and arrays, not sequences.

    chunks        what of the drafts made beside the last step is verified now
    wished, sent  who drafts ahead meanwhile, and behind which tokens
    learn         verdicts on the chunks; and at the border, on the new drafts' first tokens
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from faser.engine.contract.interference import InterferenceTable
from faser.engine.contract.plan import Drafts, StepResult
from faser.engine.control.speculation.acceptance.draft_arrays import DraftArrays, DraftReader
from faser.engine.control.speculation.acceptance.estimator import Acceptance, Outcomes
from faser.engine.control.speculation.overlap.frontiers import Border, Frontiers
from faser.engine.control.speculation.overlap.objective import OverlapChoice, best_overlap, mean_context
from faser.engine.control.speculation.policies.draft_lengths import best_lengths
from faser.engine.control.speculation.policies.objective import Objective, best_prefixes
from faser.engine.control.speculation.policies.policy import Candidates, Ints, Policy
from faser.engine.control.timing.cost_model import CostModel, ErrorTracker

AUTO, ON, OFF = "auto", "on", "off"
_SWITCH_ON, _STAY_ON = 1.03, 1.0  # G with drafting ahead over the best G without
_FIRST_STEPS = 4  # until the second judgement, twice as many until the next: at first little is known
_FORGET = 0.1  # of what overlapped steps took beyond expectation, at every judgement that does not see them


@dataclass(slots=True, kw_only=True)
class OverlapOutcome:
    """What came of the drafts made beside a step, [N] each. dropped: tokens of each that the target will not get.

    verdicts: on those that were judged for good at the border.
    """

    slots: Ints
    methods: Ints
    dropped: Ints
    verdicts: Outcomes


@dataclass(slots=True, kw_only=True)
class _Sent:
    """What is being drafted beside the step in flight; see OverlapControl.sent."""

    slots: Ints
    lengths: Ints
    unverified: tuple[tuple[int, ...], ...]


class OverlapControl:
    """See the module. lanes: measured; the shares to choose from.

    mode: on: wherever anybody may draft; off: never; auto: where it pays, by the policy's own objective.

    every: steps between two judgements, in the end. cap: most tokens of a draft.
    """

    def __init__(
        self,
        costs: CostModel,
        acceptance: Acceptance,
        lanes: tuple[InterferenceTable, ...],
        *,
        mode: str,
        every: int,
        cap: int,
        num_slots: int,
    ) -> None:
        assert lanes, "drafting ahead takes lanes"
        self._costs = costs
        self._acceptance = acceptance
        self._lanes = lanes
        self._mode = self._usual = mode
        self._every = every
        self._interval = min(_FIRST_STEPS, every)
        self._reader = DraftReader(cap)
        self._frontiers = Frontiers()
        self._choice: OverlapChoice | None = None  # None: nobody drafts ahead
        self._chosen: NDArray[np.bool_] = np.ones(num_slots, dtype=np.bool_)  # by slot
        self._steps_left = 0
        self._sent: _Sent | None = None
        self._rows, self._context = (
            0,
            0.0,
        )  # of the step that is being made, and what its sequences have in the cache
        self.cycle, self.verify_lane, self.draft_lane = (
            ErrorTracker(),
            ErrorTracker(),
            ErrorTracker(),
        )  # predicted and measured
        self.overlap_s = 0.0

    @property
    def lanes(self) -> InterferenceTable | None:
        """Those in use; None: nobody drafts ahead."""
        return None if self._choice is None else self._choice.lanes

    def reset(self, mode: str | None) -> None:
        """Another policy decides from now on: it starts without. mode: None: as at the beginning."""
        self._mode = mode or self._usual
        self._choice, self._steps_left = None, 0
        self._interval = min(_FIRST_STEPS, self._every)
        self._frontiers.clear()

    def start(self, slot: int) -> None:
        self._chosen[slot] = True
        self._frontiers.drop(slot)  # what was drafted beside the step in which its last owner was aborted

    def release(self, slot: int) -> None:
        self._frontiers.drop(slot)

    def is_due(self) -> bool:
        """A step begins; whether it is time to judge again."""
        self._steps_left -= 1
        return self._steps_left < 0

    def judge(self, candidates: Candidates, lengths: Ints | None) -> None:
        """Whether drafting ahead pays now. lengths: [S] what a policy without an own objective wants drafted."""
        self._steps_left = self._interval
        self._interval = min(2 * self._interval, self._every)
        objective = Objective(self._costs, candidates)
        if lengths is None:
            choice = best_overlap(candidates, objective, self._costs, self._lanes)
            wanted = self._pays(choice, candidates, objective)
        else:
            choice = self._as_asked(lengths)
            wanted = choice.lanes is not None and self._mode == ON
        if not wanted:
            self._choice = None
            self._frontiers.clear()
            self.cycle.factor += _FORGET * (1 - self.cycle.factor)
            return
        self._choice = choice
        self._chosen[candidates.slots] = False
        self._chosen[candidates.slots[choice.chosen]] = True

    def chunks(self, candidates: Candidates, policy: Policy) -> tuple[list[tuple[int, ...]], DraftArrays | None]:
        """What is verified of each one's draft. candidates.limit: most tokens of each chunk."""
        drafts = self._frontiers.standing(candidates.slots.tolist())
        self._frontiers.clear()
        self._rows, self._context = len(drafts) + candidates.other_rows, mean_context(candidates)
        chunks = [(i, draft) for i, draft in enumerate(drafts) if draft is not None and len(draft.token_ids) > 1]
        found: list[tuple[int, ...]] = [()] * len(drafts)
        if not chunks:
            return found, None
        there, ready = zip(*chunks, strict=True)
        at = np.array(there, dtype=np.int64)
        slots = candidates.slots[at]
        methods, lengths, confidences = self._reader.read(ready)
        whole = self._acceptance.drafted_survival(slots, methods, lengths, confidences)
        survival = np.zeros_like(whole)
        survival[:, :-1] = whole[:, 1:] / np.maximum(whole[:, 1:2], 1e-12)
        room = np.minimum(lengths - 1, candidates.limit[at])
        kept = policy.keep(candidates.among(at).drafted(room, survival), room)
        self._rows += int(kept.sum())
        verified = DraftArrays(
            slots=slots,
            methods=methods,
            lengths=lengths - 1,
            kept=kept,
            confidences=confidences,
            survival=survival,
            border=1,
        )
        for i, draft, length in zip(there, ready, kept.tolist(), strict=True):
            found[i] = draft.token_ids[1 : 1 + length]
        return found, verified

    def wished(self, slots: Ints, limit: Ints) -> Ints:
        """[S] tokens that each is to draft ahead, as far as limit allows; 0: none."""
        assert self._choice is not None, "nobody drafts ahead"
        return np.where(self._chosen[slots], np.clip(limit, 0, self._choice.length), 0)

    def sent(self, slots: Ints, lengths: Ints, behind: tuple[tuple[int, ...], ...]) -> None:
        """These draft beside the step that is about to run, [N] tokens each, behind these tokens."""
        self._sent = _Sent(slots=slots, lengths=lengths, unverified=behind)

    def learn(self, result: StepResult, drafts: Drafts, *, verify_s: float) -> OverlapOutcome:
        """Take in the step and what was drafted beside it. verify_s: that the step should take alone."""
        assert self._sent is not None, "nobody drafted beside this step"
        sent, self._sent = self._sent, None
        self._note_time(result, drafts, verify_s)
        slots = sent.slots
        methods, lengths, confidences = self._reader.read(drafts.drafts)
        self._acceptance.offered(slots, sent.lengths, lengths)
        brought, judge = {each.slot: each.token_ids for each in result.sequences}, self._frontiers.judge
        borders = [
            judge(behind, draft, brought.get(draft.slot, ()))
            for behind, draft in zip(sent.unverified, drafts.drafts, strict=True)
        ]
        right, wrong = Border.PASSED, Border.REFUSED
        passed = np.array([border is right for border in borders])
        refused = np.array([border is wrong for border in borders])
        over = (refused | (passed & (lengths == 1))).nonzero()[0]  # the others' verdicts come with their chunks
        return OverlapOutcome(
            slots=slots,
            methods=methods,
            dropped=np.where(passed, 1, lengths),
            verdicts=Outcomes(
                slots=slots[over],
                methods=methods[over],
                drafted=lengths[over],
                verified=np.ones_like(over),
                accepted=passed[over].astype(np.int64),
                confidences=confidences[over],
            ),
        )

    def _note_time(self, result: StepResult, drafts: Drafts, verify_s: float) -> None:
        """Both lanes against the prediction. A draft that stopped early because nobody waited counts as it was."""
        assert self._choice is not None
        lanes = self._choice.lanes
        assert lanes is not None
        verified_s, drafted_s = result.began_s + result.run_s, drafts.began_s + drafts.run_s
        draft_s = self._draft_s(len(drafts.drafts), drafts.passes)
        predicted_s = lanes.one(verify_s, draft_s, rows=self._rows, context=self._context)
        verify, draft, _, _ = lanes.factors(np.array(self._rows), self._context).tolist()
        measured_s = max(verified_s, drafted_s) - min(result.began_s, drafts.began_s)
        self.cycle.add(predicted_s * self.cycle.factor, measured_s)
        self.verify_lane.add(verify_s * verify, result.run_s)
        self.draft_lane.add(draft_s * draft, drafts.run_s)
        self.overlap_s += max(min(verified_s, drafted_s) - max(result.began_s, drafts.began_s), 0.0)

    def _draft_s(self, count: int, passes: int) -> float:
        """What making drafts of so many sequences would take alone on everything."""
        return self._costs.text_s(count) + self._costs.pass_s(count) * passes

    def _pays(self, choice: OverlapChoice, candidates: Candidates, objective: Objective) -> bool:
        if choice.lanes is None or self._mode == OFF:
            return False
        if self._mode == ON:
            return True
        if self._costs.has_passes:
            without = best_lengths(candidates, objective, self._costs).rate
        else:
            worth = candidates.survival[:, 1:] * candidates.weight[:, None]
            looking_s = self._costs.text_s(candidates.num_sequences)
            without = best_prefixes(objective, worth, candidates.limit, looking_s).rate
        gain = choice.rate / self.cycle.factor / max(without, objective.plain_rate)
        return gain > (_STAY_ON if self._choice is not None else _SWITCH_ON)

    def _as_asked(self, lengths: Ints) -> OverlapChoice:
        """Everybody for whom a policy wants drafts, as long as its longest."""
        chosen = lengths.nonzero()[0]
        return OverlapChoice(
            chosen=chosen,
            length=int(lengths.max(initial=0)),
            lanes=self._lanes[-1] if len(chosen) else None,
            rate=0.0,
        )
