"""The objective G of several policies: tokens per second of a step, as a function of the draft tokens in it.

    G = (tokens of a step without drafts + expected accepted draft tokens) / seconds of the whole step

Prompts share the step, but their time is spent with or without drafts. So a draft row is charged what it adds to
the step as it is, and the rest of the step counts as one that only decodes; otherwise a long prompt would make
drafts look cheap. A draft row attends to the mean context of the candidates, so that time depends on the number of
draft rows alone.

How far the sequences of a step draft with a model, which needs a pass for each token: the maximum of G.

The best m sequences draft to a common depth d, each at most to its own limit; every pair (m, d) is tried. Depths
by sequence would gain little: the deepest sequence pays for the passes, and the cut after drafting, which knows
the confidences, is by sequence anyway.
"""

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from faser.engine.contract.native_acceptance import NativeAcceptance
from faser.engine.control.speculation.policy import Candidates
from faser.engine.control.step_cost import CostModel
from faser.types.arrays import Floats, Ints


class Objective:
    """One step's tokens and time. worth: tokens that it brings without drafts.

    Holds the times for up to K + 1 draft tokens of each candidate.
    """

    __slots__ = ("_decodes", "_posterior", "_steps_s", "_verify_s", "seconds_without_drafts", "worth")

    def __init__(self, costs: CostModel, candidates: Candidates) -> None:
        count, num_columns = candidates.survival.shape
        self._decodes = decodes = count + candidates.step.other_sequences
        self._posterior = costs.posterior
        self.worth = float(decodes)
        rows = count + candidates.step.other_rows
        self._steps_s = self._verify_s = costs.steps_s(
            rows,
            rows + count * num_columns,
            candidates.step.kv_tokens,
            candidates.step.mean_context,
            sequences=decodes,
        )
        self.seconds_without_drafts = self._steps_s.item(0)
        if decodes != rows:
            self.seconds_without_drafts = costs.step_s(decodes, candidates.step.kv_tokens)
            self._verify_s = self._steps_s + (self.seconds_without_drafts - self._steps_s.item(0))

    @property
    def drafting_gap_s(self) -> float:
        """Host time by which drafts delay the step, however many there are; no part of verify_s."""
        return self._posterior.host_s(self._decodes)

    @property
    def prompts_s(self) -> float:
        """Time by which prompts lengthen the step; no part of verify_s."""
        return self._steps_s.item(0) - self.seconds_without_drafts

    @property
    def rate_without_drafts(self) -> float:
        """In tokens per second."""
        return self.worth / self.seconds_without_drafts

    def least_row_price(self, most: int) -> float:
        """Return the tokens that a draft row has to bring, of as many rows, 1 … most, as are cheapest a row."""
        added_s = self._verify_s[1 : most + 1] - self._verify_s.item(0)
        added_s /= np.arange(1.0, most + 1.0)
        return self.rate_without_drafts * float(np.minimum.reduce(added_s))

    def verify_s(self, num_drafted: Ints) -> Floats:
        """Seconds of the step with num_drafted draft rows; any shape."""
        return self._verify_s.take(num_drafted)

    def verify_upto_s(self, most: int) -> Floats:
        """Return the seconds [most + 1] of the step with 0 … most draft rows, and of keeping any on the host."""
        found = self._verify_s[: most + 1]
        if kept_s := self._posterior.kept_s(self._decodes):
            found = found + kept_s
            found[0] -= kept_s
        return found

    def verified_s(self, count: int) -> float:
        """Seconds of the whole step that verifies this number of draft tokens, its prompts included."""
        return self.prompts_s + self._verify_s.item(count)

    def row_s(self, first: int, last: int) -> float:
        """Mean seconds that a draft row adds from the first to the last number of rows; last > first."""
        return (self._steps_s.item(last) - self._steps_s.item(first)) / (last - first)


@dataclass(slots=True, kw_only=True)
class Choice:
    """lengths: [S] tokens. rate: G with them, in tokens per second."""

    lengths: Ints
    rate: float


def best_prefixes(
    objective: Objective, survival: Floats, lengths: Ints, extra_s: float = 0.0, *, least: Ints | None = None
) -> Choice:
    """Return how many of each sequence's draft tokens to verify so that G is largest; exact.

    survival: [S, K + 1]. lengths: [S] tokens of each draft. extra_s: seconds in addition to the step. least: [S]
    tokens that are verified in any case (needs.py). Of the others the most likely ones come first, and since
    survival falls they form prefixes. Every number of them is tried, because time is a staircase.
    """
    offered, tokens, num_first = best_first(survival[:, 1:], lengths, least)
    worth = np.empty(len(offered) + 1)
    worth[0] = objective.worth
    worth[1:] = offered
    np.add.accumulate(worth, out=worth)
    worth /= objective.verify_upto_s(len(offered)) + extra_s
    best = num_first + int(worth[num_first:].argmax())
    if len(lengths) == 1:
        return Choice(lengths=np.array([best]), rate=worth.item(best))
    taken = np.bincount(tokens[:best] // (survival.shape[1] - 1), minlength=len(lengths))
    return Choice(lengths=taken, rate=worth.item(best))


def best_kept(
    objective: Objective,
    candidates: Candidates,
    lengths: Ints,
    native: NativeAcceptance,
    least: Ints | None = None,
) -> Choice:
    """The same for the drafts of candidates."""
    seconds = objective.verify_upto_s(lengths.size * (candidates.survival.shape[1] - 1))
    kept, rate = native.best_prefixes(candidates.survival, least, lengths, seconds, objective.worth)
    return Choice(lengths=kept, rate=rate)


def best_first(survival: Floats, lengths: Ints, least: Ints | None) -> tuple[Floats, Ints, int]:
    """Survival of the drafts' tokens and the index of each, [S, K] flattened: the least ones, then falling.

    Also how many the least ones are.
    """
    if len(lengths) == 1:
        count = lengths.item(0)
        return survival[0, :count], np.arange(count), 0 if least is None else least.item(0)
    drafts = upto(survival.shape[1])
    is_offered = drafts.take(lengths, axis=0)
    first = None
    if least is not None:
        is_first = drafts.take(least, axis=0)
        first, is_offered = is_first.ravel().nonzero()[0], is_offered & ~is_first
    tokens = is_offered.ravel().nonzero()[0]
    offered = survival.take(tokens)
    order = (-offered).argsort(kind="stable")
    tokens = tokens.take(order)
    if first is None:
        return offered.take(order), tokens, 0
    tokens = np.concatenate((first, tokens))
    return survival.take(tokens), tokens, len(first)


@functools.lru_cache(maxsize=8)
def upto(num_depths: int) -> NDArray[np.bool_]:
    """Return a mask [K + 1, K]; line n is True for the first n depths. Read only."""
    return np.tri(num_depths + 1, num_depths, -1, dtype=np.bool_)


def seconds_with_drafts(candidates: Candidates, lengths: Ints, objective: Objective, costs: CostModel) -> float:
    """Return the seconds of the step with model drafts of these lengths, less what prompts add."""
    drafted = lengths.sum(keepdims=True)
    gap_s = objective.drafting_gap_s if drafted.item(0) else 0.0
    return costs.draft_s(lengths, candidates.sequences.missing_kv) + float(objective.verify_s(drafted)[0]) + gap_s


# Reasoned, not fitted: how throughput changes with each halved or doubled is in results/control-constants.json.
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


def text_drafts(candidates: Candidates, objective: Objective, least: Ints | None = None) -> TextDrafts:
    """candidates.limit, survival: lengths and survival of the drafts from text."""
    choice = best_prefixes(objective, candidates.survival, candidates.limit, least=least)
    worth = candidates.survival[:, 1:] * upto(candidates.survival.shape[1] - 1).take(choice.lengths, axis=0)
    return TextDrafts(rows=choice.lengths, worth=worth.sum(axis=1), rate=choice.rate)


def best_lengths(
    candidates: Candidates, objective: Objective, costs: CostModel, text: TextDrafts | None = None
) -> Choice:
    """The lengths with the largest G; all 0 where the step is better without drafts by the model."""
    limit, survival = candidates.limit, candidates.survival[:, 1:]
    num_depths = survival.shape[1]
    missing_s = _catchup_s(candidates, costs)
    without = objective.rate_without_drafts if text is None else text.rate
    order = _sequences_best_first(survival, limit, missing_s * without, text)
    drafts = upto(num_depths).take(limit.take(order), axis=0)  # [S, K]
    worth = survival.take(order, axis=0)
    worth *= drafts
    tokens = np.add.accumulate(np.add.accumulate(worth, axis=1, out=worth), axis=0, out=worth)
    drafting = np.add.accumulate(drafts, axis=0, dtype=np.int64)  # of the best m, in the pass of each depth
    seconds = costs.passes_s(drafting)
    rows = np.add.accumulate(drafting, axis=1)
    tokens += objective.worth
    if text is None:
        seconds += costs.text_s(drafting[:, :1]) + objective.drafting_gap_s
    else:
        rows += (text.rows.sum() - np.add.accumulate(text.rows.take(order)))[:, None]
        tokens += (text.worth.sum() - np.add.accumulate(text.worth.take(order)))[:, None]
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


def _sequences_best_first(survival: Floats, limit: Ints, prices: Floats, text: TextDrafts | None) -> Ints:
    """Return the positions [S] by the gain of a whole draft of the model, less its price in tokens."""
    if len(limit) == 1:
        return np.zeros(1, dtype=np.int64)
    gains = (survival * upto(survival.shape[1]).take(limit, axis=0)).sum(axis=1) - prices
    if text is not None:
        gains -= text.worth
    return np.argsort(-gains, kind="stable")


def _catchup_s(candidates: Candidates, costs: CostModel) -> Floats:
    """Return the seconds [S] per step for the missing draft KV: an investment in the remaining steps."""
    if not np.count_nonzero(candidates.sequences.missing_kv):
        return np.zeros(candidates.num_sequences)
    seconds = costs.catchup_s(candidates.sequences.missing_kv)
    steps = _PAID_BACK * candidates.sequences.remaining / (1.0 + candidates.survival[:, 1])
    return seconds / np.clip(steps, 1.0, CATCHUP_HORIZON)
