"""The policies that others are compared with, and make_policy, which makes any by name.

    off        no sequence drafts
    fixed      every sequence drafts the same number of tokens, and all of them are verified
    table      one draft length for all sequences, by how many the step has (vLLM's dynamic lengths)
    goodput    one acceptance rate and one draft length for all (SmartSpec, arXiv:2406.14066)
    survival   draft as much as allowed, then verify the draft tokens most likely to survive
    faser      the default, in faser_policy.py

Goodput of length k is tokens per second of the whole step, with (1 - α^(k+1)) / (1 - α) tokens per sequence
(section 3). Once drafting is off it must gain a tenth to be switched on again, so that noise does not do it.

vLLM calls `survival` adaptive verification (pull requests 47808 and 52228): all draft tokens of a batch are
ranked by the probability that they and all tokens before them are accepted, and the ranking is cut where tokens
per second peak.
"""

from bisect import bisect_left

import numpy as np

from faser.config.speculation import POLICIES, SpeculationConfig
from faser.engine.control.speculation.acceptance import Acceptance
from faser.engine.control.speculation.draft_lengths import Objective, best_prefixes
from faser.engine.control.speculation.policy import Candidates, Policy
from faser.engine.control.step_cost import CostModel
from faser.errors import ConfigError
from faser.types.arrays import Ints


def make_policy(config: SpeculationConfig, costs: CostModel, acceptance: Acceptance) -> Policy:
    """The policy that config names. It reads costs and acceptance and writes neither.

    Raises ConfigError for a name that is not known here, and for `table` without a table.
    """
    match config.policy:
        case "off":
            return Off()
        case "fixed":
            return Fixed(config.cap)
        case "table":
            return Table(config.table)
        case "goodput":
            return Goodput(costs)
        case "survival":
            return Survival(costs)
        case "faser":
            from faser.engine.control.speculation.faser_policy import Faser

            method = config.pass_method or "draft_model"
            return Faser(costs, acceptance, method=method, has_text=config.drafts_from_text)
        case _:
            raise ConfigError(f"policy is {config.policy}; it must be one of {', '.join(POLICIES)}")


class Off(Policy):
    name = "off"
    never_drafts = True

    def lengths(self, candidates: Candidates) -> Ints:
        return np.zeros_like(candidates.limit)


class Fixed(Policy):
    """gamma: tokens of a draft, at least 1."""

    name = "fixed"

    def __init__(self, gamma: int) -> None:
        assert gamma >= 1, f"a draft of {gamma} tokens; off is a policy of its own"
        self._gamma = gamma

    def lengths(self, candidates: Candidates) -> Ints:
        return np.minimum(candidates.limit, self._gamma)


class Table(Policy):
    """entries: (first, last, gamma), ascending without gaps; beyond the last entry its gamma holds.

    Raises ConfigError for an empty table.
    """

    name = "table"

    def __init__(self, entries: tuple[tuple[int, int, int], ...]) -> None:
        if not entries:
            raise ConfigError("policy is table, but no table of draft lengths by number of sequences is given")
        self._lasts = [last for _, last, _ in entries]
        self._gammas = [gamma for _, _, gamma in entries]

    def lengths(self, candidates: Candidates) -> Ints:
        num_sequences = candidates.num_sequences + candidates.step.other_sequences
        at = min(bisect_left(self._lasts, num_sequences), len(self._gammas) - 1)
        return np.minimum(candidates.limit, self._gammas[at])


_SWITCH_ON = 1.10  # expected goodput with drafts over that without, from which on they begin


class Goodput(Policy):
    name = "goodput"
    is_guarded = True

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._on = True

    def lengths(self, candidates: Candidates) -> Ints:
        deepest = int(candidates.limit.max(initial=0))
        if deepest == 0:
            return np.zeros_like(candidates.limit)
        objective = Objective(self._costs, candidates)
        rates = np.array(
            [objective.rate_without_drafts, *(self._rate(candidates, objective, k) for k in range(1, deepest + 1))]
        )
        needed = rates[0] if self._on else rates[0] * _SWITCH_ON
        best = int(np.argmax(rates))
        self._on = best > 0 and float(rates[best]) > needed
        return np.minimum(candidates.limit, best if self._on else 0)

    def _rate(self, candidates: Candidates, objective: Objective, gamma: int) -> float:
        lengths = np.minimum(candidates.limit, gamma)
        alpha = float(candidates.survival[:, 1].mean())
        worth = objective.worth + float((alpha ** np.arange(1, gamma + 1))[: int(lengths.max())].sum()) * len(
            lengths
        )
        seconds = objective.verify_s(lengths.sum(keepdims=True))[0] + self._costs.draft_s(
            lengths, candidates.sequences.missing_kv
        )
        return worth / float(seconds)


class Survival(Policy):
    """The time of drafting counts in the step although it is spent already; all tokens weigh the same."""

    name = "survival"
    is_guarded = True

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs

    def lengths(self, candidates: Candidates) -> Ints:
        return candidates.limit.copy()

    def keep(self, candidates: Candidates, lengths: Ints) -> Ints:
        sunk_s = self._costs.draft_s(lengths, candidates.sequences.missing_kv)
        objective = Objective(self._costs, candidates)
        return best_prefixes(objective, candidates.survival, lengths, sunk_s).lengths
