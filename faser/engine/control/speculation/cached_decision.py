"""The decision that stands: who drafts how much is kept for a few steps, and so are the verdicts.

In a large batch, where what one step teaches moves little; and where drafts come from text, as all there is to
decide is whether to look. Every cut is still judged by the drafts' own confidences. Owns that decision by slot,
how many steps it has left, and the verdicts that wait for its end. Decides nothing itself.
"""

from dataclasses import dataclass

import numpy as np

from faser.engine.contract.plan import StopRule
from faser.engine.control.speculation.acceptance.estimator import Acceptance, Outcomes
from faser.engine.control.speculation.policies.policy import Candidates, Floats, Ints

_SEQUENCES_A_STEP, _MOST_STEPS_KEPT = 16, 4  # a decision for 16 sequences is kept for 2 steps, for 48 for 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedDecision:
    """By slot: survival and lengths as in Candidates and Wish; written where a sequence comes.

    usual: mean length, for who comes later. num_sequences: that it was made for; of num_drafting of them the stop
    rule has prices.
    """

    survival: Floats
    lengths: Ints
    usual: int
    num_sequences: int
    stop: StopRule | None
    num_drafting: int


class DecisionCache:
    """See the module. acceptance: whom the verdicts teach. num_slots, cap: of its arrays.

    looks: drafts are looked up, so that decisions are kept in small batches too.
    """

    def __init__(self, acceptance: Acceptance, num_slots: int, cap: int, *, looks: bool = False) -> None:
        self._acceptance = acceptance
        self._sequences_a_step = 0 if looks else _SEQUENCES_A_STEP
        self._num_slots = num_slots
        self._cap = cap
        self._decision: CachedDecision | None = None
        self._steps_left = 0
        self._lessons: list[Outcomes] = []  # of the steps that the decision has been kept for

    def start(self, slot: int) -> None:
        """A sequence comes, and drafts what is usual."""
        if self._decision is not None:
            self._decision.lengths[slot] = self._decision.usual

    def release(self, slot: int) -> None:
        """What the sequence that leaves would have taught is lost."""
        if self._lessons:
            self._lessons = [each.without(slot) for each in self._lessons]

    def drop(self) -> None:
        """Another policy decides from now on."""
        self.take_lessons()
        self._decision = None

    def rest(self) -> None:
        """Nobody is asked for the time being."""
        self._decision, self._steps_left = None, 0

    def next(self, count: int, *, is_due: bool) -> CachedDecision | None:
        """What holds for a step of count sequences; None: it is time for another decision, and for its lessons.

        is_due: a new one is wanted anyway.
        """
        self._steps_left -= 1
        decision = self._decision
        if decision is None or self._steps_left < 0 or is_due or _many_moved(decision, count):
            self.take_lessons()
            return None
        return decision

    def keep(self, candidates: Candidates, lengths: Ints, stop: StopRule | None, num_drafting: int) -> None:
        """A decision was made for this step, and perhaps for the next ones."""
        count, share = candidates.num_sequences, self._sequences_a_step
        self._steps_left = min(count // share if share else _MOST_STEPS_KEPT, _MOST_STEPS_KEPT - 1)
        self._decision = None
        if not self._steps_left:
            return
        usual = round(int(np.add.reduce(lengths)) / count)
        by_slot = np.full(self._num_slots, usual, dtype=np.int64)
        by_slot[candidates.slots] = lengths
        survival = np.empty((self._num_slots, self._cap + 1))
        survival[:] = np.add.reduce(candidates.survival, axis=0) / count
        survival[candidates.slots] = candidates.survival
        self._decision = CachedDecision(
            survival=survival,
            lengths=by_slot,
            usual=usual,
            num_sequences=count,
            stop=stop,
            num_drafting=num_drafting,
        )

    def collect(self, outcomes: Outcomes) -> None:
        """While a decision stands its verdicts would change nothing; they are taken in before the next one."""
        self._lessons.append(outcomes)
        if self._steps_left <= 0:
            self.take_lessons()

    def take_lessons(self) -> None:
        if self._lessons:
            self._acceptance.learn(*self._lessons)
            self._lessons.clear()


def _many_moved(decision: CachedDecision, count: int) -> bool:
    """Whether more came or went than a decision bears."""
    return abs(count - decision.num_sequences) * _SEQUENCES_A_STEP > count
