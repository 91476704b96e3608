"""The policy `faser`: every sequence drafts as far as it pays for the whole step.

G, the expected tokens per second of the whole step with its drafting (see objective.py), is maximised twice: over
draft lengths before drafting, and over verified tokens once the drafts' confidences are known. In between the stop
rule ends drafting where another pass does not pay: its prices are those of Dinkelbach's method, seconds times G.
Where steps without drafts are better, no sequence drafts except for probes, which take a fixed share of the time.
"""

import functools

import numpy as np

from faser.engine.contract.plan import StopRule
from faser.engine.control.speculation.acceptance.estimator import Acceptance
from faser.engine.control.speculation.policies.draft_lengths import best_lengths
from faser.engine.control.speculation.policies.objective import Choice, Objective, best_prefixes
from faser.engine.control.speculation.policies.policy import Candidates, Ints, Policy
from faser.engine.control.speculation.policies.probes import Probes
from faser.engine.control.timing.cost_model import CostModel

_SWITCH_ON, _STAY_ON = 1.03, 1.0  # G with drafts over G without
_DWELL_STEPS = 2  # between two switches: noise of the load must not flap them
_DEEPER = 2  # tokens beyond the expected optimum that a confident draft may go
_BEND = 1.5  # a row this many times as dear as the rows before it lies beyond a bend of the step time
_FOLLOW = 0.05  # weight of the newest step in the gain of drafts from text
_ONE = np.array(1)


class Faser(Policy):
    """method: the drafter that needs a pass per token, if the engine has one."""

    name = "faser"

    def __init__(self, costs: CostModel, acceptance: Acceptance, *, method: str) -> None:
        self._costs = costs
        self._acceptance = acceptance
        self._method = method
        self._probes = Probes()
        self._on = False
        self._since_switch = _DWELL_STEPS
        self._rate = 0.0  # G of the last lengths
        self._row_price = (
            0.0  # tokens that this G brings in the time of one of their rows, before they were deepened
        )
        self._followed_gain = 2 * _SWITCH_ON  # G with drafts from text over G without, as keep() sees it

    def lengths(self, candidates: Candidates) -> Ints:
        if not np.count_nonzero(candidates.limit):
            return np.zeros_like(candidates.limit)
        objective = Objective(self._costs, candidates)
        if self._costs.has_passes:
            choice = best_lengths(candidates, objective, self._costs)
            self._switch(choice.rate / objective.rate_without_drafts, candidates.since)
            wanted = self._deepened(candidates, choice, objective)
        else:
            looking_s = self._costs.text_s(candidates.num_sequences) + objective.drafting_gap_s
            worth = candidates.survival[:, 1:] * candidates.weight[:, None]
            choice = best_prefixes(objective, worth, candidates.limit, looking_s)
            self._switch(self._text_gain(candidates, choice, objective), candidates.since)
            wanted = candidates.limit
        num_chosen = sum(choice.lengths.tolist())
        self._rate, self._row_price = choice.rate, choice.rate * objective.row_s(0, max(num_chosen, 1))
        lengths = wanted if self._on else np.zeros_like(candidates.limit)
        return self._probes.add(candidates, lengths, objective, self._costs)

    def stop_rule(self, candidates: Candidates, lengths: Ints) -> StopRule | None:
        """Prices are in expected tokens: what the same time brings at the rate that lengths() found.

        A token is kept while it is worth a row. The next one is worth the survival so far times its own
        acceptance, which is unknown, so the usual one is taken; it costs a pass and a row.
        """
        if not self._costs.has_passes or not self._on:
            return None
        count, row_price = len(lengths), self._row_price
        usual = float(np.add.reduce(candidates.survival[:, 1])) / count
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
            self._followed_gain += _FOLLOW * (1.0 - self._followed_gain)
            return lengths
        objective = Objective(self._costs, candidates)
        values = candidates.survival[:, 1:] * candidates.weight[:, None]
        choice = best_prefixes(objective, values, lengths)
        self._followed_gain += _FOLLOW * (choice.rate / objective.rate_without_drafts - self._followed_gain)
        return choice.lengths

    def _switch(self, gain: float, since: int) -> None:
        """Switch drafting on or off for all sequences, with hysteresis. since: steps since the last call."""
        self._since_switch += since
        wanted = gain > (_STAY_ON if self._on else _SWITCH_ON)
        if wanted != self._on and self._since_switch >= _DWELL_STEPS:
            self._on, self._since_switch = wanted, 0

    def _deepened(self, candidates: Candidates, choice: Choice, objective: Objective) -> Ints:
        """Upper bounds beyond the expected optimum, so that confident drafts may go on until stop_rule ends them.

        They apply only where one more token of each draft would pay if its survival were half way between the
        expected one and certainty, and not across a bend of the step time: the rule has one price for all rows.
        """
        drafting = choice.lengths.nonzero()[0]
        count = len(drafting)
        if not count:
            return choice.lengths
        chosen = sum(choice.lengths.tolist())
        row_s = objective.row_s(chosen, chosen + count)
        if row_s > _BEND * objective.row_s(0, chosen):
            return choice.lengths
        lengths, limit = choice.lengths.take(drafting), candidates.limit.take(drafting)
        next_survival = candidates.survival[drafting, np.minimum(lengths + _ONE, limit)]
        hoped = (1 + float(np.add.reduce(next_survival)) / count) / 2
        if choice.rate * (row_s + self._costs.pass_s(count) / count) > hoped:
            return choice.lengths
        deeper: Ints = _deeper(candidates.survival.shape[1]).take(choice.lengths)
        return np.minimum(deeper, candidates.limit, out=deeper)

    def _text_gain(self, candidates: Candidates, choice: Choice, objective: Objective) -> float:
        """G with look-ups over G without: as expected, or as followed by keep() if that is more.

        Text costs little to look up and keep() cuts what is not worth its rows, so all sequences look up, or none.
        The followed gain counts because drafts differ: where the mean draft does not pay, the best may. It is
        limited to what certain tokens would bring.
        """
        drafting_s = self._costs.text_s(candidates.num_sequences) + objective.drafting_gap_s
        followed = (
            self._followed_gain
            * objective.seconds_without_drafts
            / (objective.seconds_without_drafts + drafting_s)
        )
        most = sum(candidates.limit.tolist())
        certain = objective.worth + float(candidates.weight.max()) * np.arange(most + 1)
        possible = float((certain / (objective.verify_upto_s(most) + drafting_s)).max())
        return (
            max(choice.rate, min(followed * objective.rate_without_drafts, possible))
            / objective.rate_without_drafts
        )


@functools.lru_cache(maxsize=8)
def _deeper(num_lengths: int) -> Ints:
    """The upper bound beyond each length; 0 stays 0. Read only."""
    lengths = np.arange(num_lengths)
    return np.where(lengths > 0, lengths + np.maximum(lengths // 2, _DEEPER), 0)
