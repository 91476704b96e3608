"""How far the sequences of a step draft with a model, which needs a pass for each token: the maximum of G.

The best m sequences draft to a common depth d, each at most to its own limit; every pair (m, d) is tried. Depths
by sequence would gain little: the deepest sequence pays for the passes, and the cut after drafting, which knows
the confidences, is by sequence anyway.
"""

from dataclasses import dataclass

import numpy as np

from faser.engine.control.speculation.policies.objective import Choice, Objective, best_prefixes, upto
from faser.engine.control.speculation.policies.policy import Candidates, Floats, Ints
from faser.engine.control.step_cost import CostModel

CATCHUP_HORIZON = 64  # steps over which the time for missing draft KV is spread, at most
_PAID_BACK = 0.5  # part of the remaining steps that must repay it: later, steps without drafts may be better


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDrafts:
    """Drafts from text that are there already, each of which a model's draft would replace.

    rows: [S] of their tokens that are worth a row. worth: [S] of these tokens. rate: G with them.
    """

    rows: Ints
    worth: Floats
    rate: float


def text_drafts(candidates: Candidates, objective: Objective) -> TextDrafts:
    """candidates.limit, survival: lengths and survival of the drafts from text."""
    worth = candidates.survival[:, 1:] * candidates.weight[:, None]
    choice = best_prefixes(objective, worth, candidates.limit)
    worth *= upto(worth.shape[1]).take(choice.lengths, axis=0)
    return TextDrafts(rows=choice.lengths, worth=np.add.reduce(worth, axis=1), rate=choice.rate)


def best_lengths(
    candidates: Candidates, objective: Objective, costs: CostModel, text: TextDrafts | None = None
) -> Choice:
    """The lengths with the largest G; all 0 where the step is better without drafts by the model."""
    limit = candidates.limit
    num_depths = candidates.survival.shape[1] - 1
    worth = candidates.survival[:, 1:] * candidates.weight[:, None]
    missing_s = _catchup_s(candidates, costs)
    without = objective.rate_without_drafts if text is None else text.rate
    order = _best_first(worth, limit, missing_s * without, text)
    drafts = upto(num_depths).take(limit.take(order), axis=0)  # [S, K]
    worth = worth.take(order, axis=0)
    worth *= drafts
    tokens = np.add.accumulate(np.add.accumulate(worth, axis=1, out=worth), axis=0, out=worth)
    drafting = np.add.accumulate(drafts, axis=0, dtype=np.int64)  # of the best m, in the pass of each depth
    seconds = np.add.accumulate(costs.pass_s(drafting), axis=1)
    rows = np.add.accumulate(drafting, axis=1)
    tokens += objective.worth
    if text is None:
        seconds += costs.text_s(drafting[:, :1]) + objective.drafting_gap_s
    else:
        rows += (np.add.reduce(text.rows) - np.add.accumulate(text.rows.take(order)))[:, None]
        tokens += (np.add.reduce(text.worth) - np.add.accumulate(text.worth.take(order)))[:, None]
    if np.count_nonzero(missing_s):
        seconds += np.add.accumulate(missing_s.take(order))[:, None]
    seconds += objective.verify_s(rows)
    tokens /= seconds
    best = int(tokens.argmax())
    lengths = np.zeros_like(limit)
    if tokens.item(best) <= without:
        return Choice(lengths=lengths, rate=without)
    last, depth = divmod(best, num_depths)
    chosen = order[: last + 1]
    lengths[chosen] = np.minimum(limit.take(chosen), depth + 1)
    return Choice(lengths=lengths, rate=tokens.item(best))


def _best_first(worth: Floats, limit: Ints, prices: Floats, text: TextDrafts | None) -> Ints:
    """[S] positions by what a whole draft of the model adds, less what it costs each sequence in tokens."""
    if len(limit) == 1:
        return np.zeros(1, dtype=np.int64)
    gains = np.add.reduce(worth * upto(worth.shape[1]).take(limit, axis=0), axis=1) - prices
    if text is not None:
        gains -= text.worth
    return np.argsort(-gains, kind="stable")


def _catchup_s(candidates: Candidates, costs: CostModel) -> Floats:
    """[S] seconds per step for the missing draft KV: an investment in the remaining steps."""
    if not np.count_nonzero(candidates.missing_kv):
        return np.zeros(candidates.num_sequences)
    seconds = costs.catchup_s(candidates.missing_kv)
    if candidates.remaining is None:
        return seconds / CATCHUP_HORIZON
    steps = _PAID_BACK * candidates.remaining / (1.0 + candidates.survival[:, 1])
    return seconds / np.clip(steps, 1.0, CATCHUP_HORIZON)
