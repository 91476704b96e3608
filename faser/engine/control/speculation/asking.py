"""When the policy is asked about a step, and whether the guard lets the step draft.

    steps without a draft    1  2  3  4  8  16  32  32 …    steps until the policy is asked again
    a sequence drafts        0                              no pause
    the guard says no                                       the policy is not asked, and the step counts as paused

Owns the pauses and the guards; SpeculationControl asks them before a step and tells them how it ended.
"""

from collections.abc import Callable, Mapping
from typing import Any

from faser.engine.contract.plan import StepPlan
from faser.engine.control.speculation.guard import Guard, GuardedStep
from faser.types.statistics import PaidRatio, SpeculationBalance

# Reasoned, not fitted: how throughput changes with each halved or doubled is in results/control-constants.json.
_SHORT_PAUSE = 4  # steps without asking the policy that are always allowed while no sequence drafts
_LONGEST_PAUSE = 32  # steps: asking in vain then takes less than half a percent of the time
_CHANGED_SHARE = 4  # a pause ends early once one sequence in 4 has come or gone: the last answer was for others


class Pauses:
    """Pauses of the policy while no sequence drafts. since: steps since it was asked."""

    def __init__(self) -> None:
        self.since = 0
        self._length = self._passed = 0  # steps for which no decision is to be made, and has not been
        self._changes_seen = 0

    def has_ended(self, count: int, num_changes: int) -> bool:
        """Return whether the policy is to be asked. num_changes: of the count sequences, since the start."""
        if self._passed >= self._length:
            return True
        changed = num_changes - self._changes_seen
        return self._passed >= _SHORT_PAUSE and changed * _CHANGED_SHARE >= count

    def skip(self) -> None:
        """A step passes without asking."""
        self._passed += 1
        self.since += 1

    def ask(self, num_changes: int) -> int:
        """The policy is asked. Returns how many steps have begun since the last time."""
        num_steps, self._passed, self._changes_seen = 1 + self._passed, 0, num_changes
        return num_steps

    def lengthen(self) -> None:
        """The policy was asked in vain."""
        self._length = min(self._length + 1 if self._length < _SHORT_PAUSE else 2 * self._length, _LONGEST_PAUSE)

    def end(self) -> None:
        """A sequence drafts."""
        self._length = 0

    def restart(self) -> None:
        """Another policy decides from now on."""
        self._length = self._passed = 0


class Guards:
    """A guard for each policy that has one: what one policy's drafts gain says nothing about another's.

    enabled: False: no policy has one. current: of the present policy; None: it has none.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._by_policy: dict[str, Guard] = {}
        self._policy = ""
        self._noted: tuple[bool | None, bool] = (None, False)  # permission of the next step; with prompts
        self.current: Guard | None = None

    def use(self, policy: str, *, is_guarded: bool, forget: bool) -> None:
        """Another policy decides from now on. forget: drop what was learned about all of them."""
        if forget:
            self._by_policy = {}
        self._policy, self.current = policy, None
        if self._enabled and is_guarded:
            self.current = self._by_policy.setdefault(policy, Guard())

    def allows(self, num_decoding: int, *, prompts: bool) -> bool | None:
        """Return whether the next step, of num_decoding sequences, may draft; None: there is no guard to ask."""
        return None if self.current is None else self.current.allows(num_decoding, prompts=prompts)

    def note(self, permission: bool | None, *, prompts: bool) -> None:
        """Note the answer for the next step; None: it was not asked. The launch of that step takes it."""
        self._noted = permission, prompts

    def launched(
        self, plan: StepPlan, plain_s: Callable[[StepPlan], float], *, prompts: bool
    ) -> GuardedStep | None:
        """Tell the guard that the step begins. None: it was not asked about it.

        prompts: the step computes some. plain_s: predicts its seconds without drafts.
        """
        (allowed, with_prompts), self._noted = self._noted, (None, False)
        if self.current is None or allowed is None or prompts != with_prompts:
            return None
        if plan.started and not prompts:
            return None  # all of a prompt but its last token was cached
        num_sequences = sum(plan.rows.samples)
        if not num_sequences:
            return None
        guarded = GuardedStep(num_sequences=num_sequences, drafts=allowed, plain_s=plain_s(plan), prompts=prompts)
        self.current.launched(guarded)
        return guarded

    def paid(self) -> tuple[PaidRatio, ...]:
        """Return how many times as fast steps with drafts are, as measured."""
        return () if self.current is None else self.current.paid()

    def balance(self) -> SpeculationBalance | None:
        """Return the time that drafts have saved; None: nothing measures it."""
        return None if self.current is None else self.current.balance()

    def saved(self) -> dict[str, Any]:
        """Return what the present policy's guard has learned, for a later run."""
        return {} if self.current is None else {self._policy: self.current.saved()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Begin with what an earlier run has saved; changes nothing where it raises an error of its content."""
        guards = {}
        for name, loads in saved.items():
            guards[name] = Guard()
            guards[name].restore(loads)
        if self._enabled:
            self._by_policy = guards
            if self.current is not None:
                self.current = self._by_policy.setdefault(self._policy, Guard())
