"""Draft lengths that maximise G for a drafter that needs a pass per token.

Tokens are taken in the order of their expected worth, which falls along every draft, so any number of the best
tokens is a set of prefixes. The longest draft sets the number of passes: every common depth d is tried with every
number of tokens b, and the best (d, b) wins. Beyond _MAX_CUTS tokens only that many evenly spread numbers are
tried.
"""

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from faser.engine.control.speculation.policies.objective import Choice, Objective, best_prefixes, upto
from faser.engine.control.speculation.policies.policy import Candidates, Floats, Ints
from faser.engine.control.timing.cost_model import CostModel

_MAX_CUTS = 96
CATCHUP_HORIZON = 64  # steps over which the time for missing draft KV is spread, at most
_PAID_BACK = 0.5  # part of the remaining steps that must repay it: later, steps without drafts may be better


def best_lengths(candidates: Candidates, objective: Objective, costs: CostModel) -> Choice:
    """The lengths with the largest G among those that take the likeliest tokens first up to a common depth."""
    worths = candidates.survival[:, 1:] * candidates.weight[:, None]
    if candidates.num_sequences == 1:
        return best_prefixes(objective, worths, candidates.limit, _alone_s(candidates, objective, costs))
    num_sequences, num_depths = worths.shape
    there = upto(num_depths).take(candidates.limit, axis=0).ravel().nonzero()[0]
    if not len(there):
        return Choice(lengths=np.zeros_like(candidates.limit), rate=objective.rate_without_drafts)
    there, worth = _best_first(there, worths.take(there))
    cuts, cut_of = _cuts(len(there))
    line, depth = (each.take(there) for each in _lines_and_depths(num_sequences, num_depths))
    num_cuts = len(cuts)
    cell = depth * num_cuts
    cell += cut_of

    def up_to_cut(weights: Floats | None) -> NDArray[Any]:
        """[depths, cuts] sums over the tokens of each depth up to each cut."""
        counted = np.bincount(cell, weights, num_depths * num_cuts).reshape(num_depths, num_cuts)
        return np.add.accumulate(counted, axis=1, out=counted)

    drafting = up_to_cut(None)  # sequences in each pass
    seconds = costs.pass_s(drafting)
    np.add.accumulate(seconds, axis=0, out=seconds)
    if np.count_nonzero(candidates.missing_kv):
        catchup_s = _catchup_s(candidates, costs)
        seconds += up_to_cut(np.where(depth == 0, catchup_s.take(line), 0.0))[0]
    seconds += costs.text_s(drafting[0])
    seconds += objective.drafting_gap_s
    seconds += objective.verify_s(np.add.accumulate(drafting, axis=0))
    rates = up_to_cut(worth)
    np.add.accumulate(rates, axis=0, out=rates)
    rates += objective.worth
    rates /= seconds
    deepest, best = divmod(int(rates.argmax()), num_cuts)
    rate = rates.item(deepest, best)
    if rate <= objective.rate_without_drafts:
        return Choice(lengths=np.zeros_like(candidates.limit), rate=objective.rate_without_drafts)
    taken = line[: cuts[best]]
    lengths = np.bincount(taken[depth[: cuts[best]] <= deepest], minlength=num_sequences)
    return Choice(lengths=lengths, rate=rate)


def _alone_s(candidates: Candidates, objective: Objective, costs: CostModel) -> Floats:
    """[limit + 1] seconds in which one sequence drafts 0, 1, … tokens, a pass each."""
    seconds: Floats = np.arange(candidates.limit.item(0) + 1, dtype=np.float64) * costs.pass_s(1)
    seconds[1:] += costs.text_s(1) + objective.drafting_gap_s
    if candidates.missing_kv.item(0):
        seconds[1:] += _catchup_s(candidates, costs)
    return seconds


def _catchup_s(candidates: Candidates, costs: CostModel) -> Floats:
    """[S] seconds per step for the missing draft KV: an investment in the remaining steps."""
    seconds = costs.catchup_s(candidates.missing_kv)
    if candidates.remaining is None:
        return seconds / CATCHUP_HORIZON
    steps = _PAID_BACK * candidates.remaining / (1.0 + candidates.survival[:, 1])
    return seconds / np.clip(steps, 1.0, CATCHUP_HORIZON)


def _best_first(there: Ints, worth: Floats) -> tuple[Ints, Floats]:
    order = np.argsort(-worth, kind="stable")
    return there.take(order), worth.take(order)


@functools.lru_cache(maxsize=64)
def _lines_and_depths(num_sequences: int, num_depths: int) -> tuple[Ints, Ints]:
    """Line and depth of every possible token, line by line. Read only."""
    return np.repeat(np.arange(num_sequences), num_depths), np.tile(np.arange(num_depths), num_sequences)


@functools.lru_cache(maxsize=1024)
def _cuts(num_tokens: int) -> tuple[Ints, Ints]:
    """Numbers of tokens to try, ascending up to all; and the first of them that has each token. Read only."""
    if num_tokens <= _MAX_CUTS:
        return np.arange(1, num_tokens + 1), np.arange(num_tokens)
    cuts = np.linspace(num_tokens / _MAX_CUTS, num_tokens, _MAX_CUTS).astype(np.int64)
    return cuts, np.repeat(np.arange(_MAX_CUTS), np.diff(cuts, prepend=0))
