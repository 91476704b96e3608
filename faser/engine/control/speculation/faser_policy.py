"""The policy `faser`: every sequence drafts as far as it pays for the whole step.

Tokens that targets need come first (needs.py). Beyond these G, the expected tokens per second of the whole step
with its drafting (draft_lengths.py), is maximised twice: over draft lengths before drafting, and over verified
tokens once the drafts' confidences are known. In between the stop rule ends a model's drafting where another pass
does not pay: its prices are those of Dinkelbach's method, seconds times G. Where steps without a model's drafts
are better, no sequence drafts with it, except for probes, which take a fixed share of the time.

    drafts from text    cost little, so all sequences look up; the Guard sees whether that pays
    drafts by a model   the lengths with the largest G: draft_lengths.py, with hysteresis
    both                all sequences look up; then the model drafts for those for which G rises by it
"""

import numpy as np
from numpy.typing import NDArray

from faser.engine.contract.plan import StopRule
from faser.engine.control.speculation.acceptance import Acceptance
from faser.engine.control.speculation.draft_lengths import (
    Choice,
    Objective,
    TextDrafts,
    best_kept,
    best_lengths,
    seconds_with_drafts,
    text_drafts,
    upto,
)
from faser.engine.control.speculation.needs import needed_tokens
from faser.engine.control.speculation.policy import Candidates, Policy
from faser.engine.control.step_cost import CostModel
from faser.types.arrays import Ints

# Reasoned, not fitted: how throughput changes with each halved or doubled is in results/control-constants.json.
SHARE = 0.004  # of the time that probing takes at most
_FIRST_WAIT, _LONGEST_WAIT = 16, 256  # steps of a sequence between two probes
PROBE_TOKENS = 2  # of a probe: the second one tells of depth
_SAVED_STEPS = 400.0  # steps whose share the account holds at most
_NO_WAIT = 0


class Probes:
    """Short drafts of sequences that do not draft, which show whether drafting would pay again.

    Owns when each slot is due next, and an account of time. Every step pays a fixed share of its time into the
    account, and a probe is taken only when the account can pay for it, so probing never costs more than that.
    """

    def __init__(self) -> None:
        self._step = 0
        self._due = np.zeros(0, dtype=np.int64)  # by slot: step of the next probe; 0: none is planned
        self._wait = np.zeros(0, dtype=np.int64)  # by slot: steps from the last probe to the next one
        self._hope = np.zeros(0)  # by slot: expected first acceptance at the last probe
        self._saved_s = 0.0
        self._closed_until = 0

    def add(self, candidates: Candidates, lengths: Ints, objective: Objective, costs: CostModel) -> Ints:
        """lengths with probes for the sequences that are due, cheapest first, as far as the account allows."""
        self._step += candidates.step.since
        share_s = SHARE * objective.seconds_without_drafts
        self._saved_s = min(self._saved_s + candidates.step.since * share_s, _SAVED_STEPS * share_s)
        if np.count_nonzero(lengths) == np.count_nonzero(candidates.limit):
            if np.count_nonzero(self._due):
                self._cover(candidates.slots)
                self._due[candidates.slots] = _NO_WAIT
            return lengths
        idle = (lengths == 0) & (candidates.limit > 0)
        self._cover(candidates.slots)
        due = self._plan(candidates, idle)
        if not len(due) or self._step < self._closed_until:
            return lengths
        return self._pay(candidates, lengths, due, objective, costs)

    def _cover(self, slots: Ints) -> None:
        missing = int(slots.max()) + 1 - len(self._due)
        if missing > 0:
            self._due = np.concatenate((self._due, np.zeros(missing, dtype=np.int64)))
            self._wait = np.concatenate((self._wait, np.zeros(missing, dtype=np.int64)))
            self._hope = np.concatenate((self._hope, np.zeros(missing)))

    def _plan(self, candidates: Candidates, idle: NDArray[np.bool_]) -> Ints:
        """Positions of the sequences whose probe is due. A sequence that has become idle is given a date."""
        slots = candidates.slots
        self._due[slots[~idle]] = _NO_WAIT
        fresh = slots[idle & (self._due[slots] == _NO_WAIT)]
        self._wait[fresh] = _FIRST_WAIT
        self._due[fresh] = self._step + _FIRST_WAIT
        return np.flatnonzero(idle & (self._due[slots] <= self._step))

    def _pay(
        self, candidates: Candidates, lengths: Ints, due: Ints, objective: Objective, costs: CostModel
    ) -> Ints:
        """Probe as many due sequences as the account can pay for; if none, do not try again for a few steps."""
        due = due[np.argsort(candidates.sequences.missing_kv[due], kind="stable")]
        unprobed_s = seconds_with_drafts(candidates, lengths, objective, costs)
        while len(due):
            probed = lengths.copy()
            probed[due] = np.minimum(candidates.limit[due], PROBE_TOKENS)
            cost_s = seconds_with_drafts(candidates, probed, objective, costs) - unprobed_s
            if cost_s <= self._saved_s:
                self._saved_s -= max(cost_s, 0.0)
                self._settle(candidates, due)
                return probed
            due = due[: len(due) // 4]
        self._closed_until = self._step + _FIRST_WAIT // 2
        return lengths

    def _settle(self, candidates: Candidates, due: Ints) -> None:
        slots = candidates.slots[due]
        hope = candidates.survival[due, 1]
        rising = hope > self._hope[slots]
        wait = np.where(rising, self._wait[slots] // 2, self._wait[slots] * 2)
        self._wait[slots] = np.clip(wait, _FIRST_WAIT // 4, _LONGEST_WAIT)
        self._due[slots] = self._step + self._wait[slots]
        self._hope[slots] = hope


_SWITCH_ON, _STAY_ON = 1.03, 1.0  # doubled: 0.93x and 0.98x. G with a model's drafts over G without
_DWELL_STEPS = 2  # between two switches: noise of the load must not flap them
_DEEPER = 2  # tokens beyond the expected optimum that a confident draft may go
_BEND = 1.5  # a row this many times as dear as the rows before it lies beyond a bend of the step time


class Faser(Policy):
    """method: the drafter that needs a pass per token, if the engine has one.

    has_text: drafts come from text, or from text as well.
    """

    name = "faser"
    is_guarded = True

    def __init__(self, costs: CostModel, acceptance: Acceptance, *, method: str, has_text: bool) -> None:
        self._costs = costs
        self._acceptance = acceptance
        self._method = method
        self._has_text = has_text
        self._probes = Probes()
        self._probed: Ints = np.zeros(0, dtype=np.int64)  # slots whose step probes the model
        self._on = False
        self._stops = True  # drafts may stop short of the last lengths
        self._since_switch = _DWELL_STEPS
        self._rate = 0.0  # G of the last lengths
        self._row_price = 0.0  # tokens that this G brings in the time of one of their rows

    @property
    def looks_first(self) -> bool:  # type: ignore[override]
        return not self._costs.has_passes

    def row_price(self, candidates: Candidates) -> float:
        return Objective(self._costs, candidates).least_row_price(int(candidates.limit.sum()))

    def lengths(self, candidates: Candidates) -> Ints:
        if not self._costs.has_passes or not np.count_nonzero(candidates.limit):
            return candidates.limit
        objective = Objective(self._costs, candidates)
        choice = best_lengths(candidates, objective, self._costs)
        self._switch(choice.rate / objective.rate_without_drafts, candidates.step.since)
        planned = self._planned(choice if self._on else None, candidates, objective)
        lengths = self._probes.add(candidates, planned, objective, self._costs)
        if not self._has_text:
            return lengths
        if not self._on:
            self._probed = candidates.slots[lengths > planned]
        return candidates.limit

    def model_lengths(self, candidates: Candidates, by_text: Candidates) -> Ints:
        objective = Objective(self._costs, candidates)
        text = text_drafts(by_text, objective)
        if not self._on:
            probed = np.isin(candidates.slots, self._probed) & (text.rows == 0)
            probes = np.where(probed, np.minimum(candidates.limit, PROBE_TOKENS), 0)
            return np.maximum(probes, self._planned(None, candidates, objective, text))
        choice = best_lengths(candidates, objective, self._costs, text)
        return self._planned(choice, candidates, objective, text)

    def stop_rule(self, candidates: Candidates, lengths: Ints) -> StopRule | None:
        """Prices are in expected tokens: what the same time brings at the rate that the lengths were chosen for.

        A token is kept while it is worth a row. The next one is worth the survival so far times its own
        acceptance, which is unknown, so the usual one is taken; it costs a pass and a row.
        """
        if not self._costs.has_passes or self._costs.in_blocks or not self._on or not self._stops:
            return None
        count, row_price = len(lengths), self._row_price
        usual = float(candidates.survival[:, 1].sum()) / count
        going = np.arange(1, count + 1)
        pass_prices = self._costs.pass_s(going) * (self._rate / usual)
        pass_prices += going * (row_price / usual - row_price)
        intercept, slope = self._acceptance.calibration(self._method, candidates.slots)
        return StopRule(
            row_price=row_price, pass_prices=tuple(pass_prices.tolist()), intercept=intercept, slope=slope
        )

    def keep(self, candidates: Candidates, lengths: Ints) -> Ints:
        """Drafting time is spent: only what verification adds counts, and to verify no token may be best."""
        if not np.count_nonzero(lengths):
            return lengths
        objective = Objective(self._costs, candidates)
        needed = needed_tokens(candidates, lengths, lambda count, _: objective.verified_s(count))
        return best_kept(objective, candidates, lengths, self._acceptance.native, needed).lengths

    def _planned(
        self, choice: Choice | None, candidates: Candidates, objective: Objective, text: TextDrafts | None = None
    ) -> Ints:
        """Plan what targets need of the model's drafts, then what throughput wants of them. choice: None: none.

        text: drafts that are there; one that brings as many tokens as the model's would stays. Where targets need
        more than throughput wants, no draft of the step stops short.
        """
        lengths = np.zeros_like(candidates.limit) if choice is None else choice.lengths
        needed = needed_tokens(
            candidates,
            candidates.limit,
            lambda count, urgency: (
                objective.prompts_s
                + seconds_with_drafts(candidates, urgency.lengths(count), objective, self._costs)
            ),
        )
        if needed is not None and text is not None:
            by_model = candidates.survival[:, 1:] * upto(candidates.survival.shape[1] - 1).take(needed, axis=0)
            needed = np.where(by_model.sum(axis=1) > text.worth, needed, 0)
        self._stops = needed is None or not np.count_nonzero(needed > lengths)
        if needed is not None and not self._stops:
            return np.maximum(lengths, needed)
        return lengths if choice is None else self._bounds(choice, candidates, objective)

    def _bounds(self, choice: Choice, candidates: Candidates, objective: Objective) -> Ints:
        """Upper bounds beyond the expected optimum: confident drafts go on until stop_rule ends them.

        Notes the prices of that rule. It has one price for all rows, so no draft goes on across a bend of the step
        time.
        """
        lengths = choice.lengths
        chosen, drafting = sum(lengths.tolist()), np.count_nonzero(lengths)
        row_s = objective.row_s(0, max(chosen, 1))
        self._rate, self._row_price = choice.rate, choice.rate * row_s
        if not drafting or objective.row_s(chosen, chosen + drafting) > _BEND * row_s:
            return lengths
        deeper = lengths + np.maximum(lengths // 2, _DEEPER)
        return np.where(lengths > 0, np.minimum(deeper, candidates.limit), 0)

    def _switch(self, gain: float, since: int) -> None:
        """Switch the model on or off for all sequences, with hysteresis. since: steps since the last call."""
        self._since_switch += since
        wanted = gain > (_STAY_ON if self._on else _SWITCH_ON)
        if wanted != self._on and self._since_switch >= _DWELL_STEPS:
            self._on, self._since_switch = wanted, 0
