"""The pace of an engine, for the latency model: planned from step times, or fitted to the steps that it runs.

Owns what steps have taken by how many sequences decode, in tokens and seconds from one step to the next: so
drafts, host gaps and other programs are in it, whatever causes them. Knows neither requests nor targets.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from faser.engine.contract.latency_model import Pace
from faser.engine.contract.plan import StepPlan, StepResult, StepSpan
from faser.engine.control.step_cost import CostModel, steps_to_skip

# Reasoned, and varied in no filed run.
_STEPS_KEPT = 300  # of a level; older ones fade
_ENOUGH = 8  # steps after which a level is known
_SEQUENCES_PER_STEP = 32  # for which one further step is not counted: large steps take longer to count
_PROMPT_KEPT = 0.98  # of what prompts have taken, after one more step with a prompt
_OUTLIER = 3.0  # times longer than expected: a pause, no pace
_CONTEXT_KEPT = 0.995  # of the mean context after one more step
_FIRST_CONTEXT = 256  # cached tokens of a sequence, before any has run


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDrafts:
    """Every sequence drafts gamma tokens a step; one is accepted with this probability if those before it are."""

    gamma: int
    acceptance: float

    @property
    def tokens(self) -> float:
        """Tokens of a step. Source: Leviathan et al., arXiv:2211.17192, equation 1."""
        return float(sum(self.acceptance**depth for depth in range(self.gamma + 1)))


NO_DRAFTS = PlannedDrafts(gamma=0, acceptance=0.0)


def planned_pace(
    costs: CostModel,
    *,
    num_slots: int,
    most_rows: int,
    context: float = _FIRST_CONTEXT,
    drafts: PlannedDrafts = NO_DRAFTS,
    gap_s: float = 0.0,
) -> Pace:
    """Predict the pace by step times. context: mean cached tokens of a sequence. gap_s: between any two steps."""
    sequences = anchors(num_slots)
    gamma = drafts.gamma
    no_lag = np.zeros(num_slots, dtype=np.int64)
    step_s = tuple(
        costs.step_s(count * (1 + gamma), round(count * context), round(count * gamma * context))
        + costs.draft_s(np.full(count, gamma), no_lag[:count])
        + gap_s
        for count in sequences
    )
    return _with_rows(
        costs,
        sequences,
        step_s,
        (drafts.tokens,) * len(sequences),
        most_rows,
        catches_up=gamma > 0 and costs.has_passes,
    )


class PaceFit:
    """The pace of a running engine: what its step times promise, corrected by what its steps take.

    A level is the sequences whose number has as many bits, as of the guard. The promise is for as many draft rows
    as its steps had. A level that has not been seen is taken to be as far from its promise as the nearest one that
    has, with as many drafts a sequence; or to run as steps without drafts do, where that is faster: drafts that
    pay at one sequence may not pay at sixty.
    """

    def __init__(self, costs: CostModel, *, num_slots: int, most_rows: int) -> None:
        self._costs = costs
        self._num_slots, self._most_rows = num_slots, most_rows
        self.forget()

    def forget(self) -> None:
        """Nothing that was seen counts any more."""
        self._levels = [_Level() for _ in range(self._num_slots.bit_length() + 1)]
        self._plain = _Level()  # of steps without drafts, whatever their level
        self._context = float(_FIRST_CONTEXT)
        self._prompt_s = self._promised_s = 0.0  # of rows of prompts
        self._last: _Step | None = None
        self._passed_over = 0  # steps that are yet to be

    def observe(self, plan: StepPlan, result: StepResult, last: StepSpan | None) -> None:
        """A step has been run. last: how long the one before was; None: nothing followed it at once."""
        if self._last is not None and last is not None and last.seconds > 0:
            self._learn(self._last, last.seconds)
        self._last = None
        if self._passed_over:
            self._passed_over -= 1
            return
        count, kv_tokens = len(plan.rows), plan.kv_tokens
        self._passed_over = max(count // _SEQUENCES_PER_STEP, steps_to_skip(result.run_s))
        self._last = _Step(
            num_sequences=count,
            num_prompt_rows=plan.num_rows - count - plan.num_drafts,
            num_drafts=plan.num_drafts,
            num_tokens=sum(result.counts),
            kv_tokens=kv_tokens,
            kv_row_tokens=plan.kv_row_tokens,
        )

    def pace(self, *, num_slots: int | None = None) -> Pace:
        """Return the pace as of now. num_slots: maximum of running sequences; None: as many as there are slots."""
        sequences = anchors(num_slots or self._num_slots)
        known = [at for at, level in enumerate(self._levels) if level.num_steps >= _ENOUGH]
        step_s, tokens = zip(*(self._level_pace(count, known) for count in sequences), strict=True)
        factor = self._prompt_s / self._promised_s if self._promised_s else 1.0
        return _with_rows(self._costs, sequences, step_s, tokens, self._most_rows, factor)

    def _level_pace(self, count: int, known: Many[int]) -> tuple[float, float]:
        """Seconds of a step in which this number of sequences decode, and its tokens of each."""
        own = count.bit_length()
        _, at = min(((abs(at - own), at) for at in known), default=(0, None))
        if at is None:
            return self._promise_s(count), 1.0
        level = self._levels[at]
        found = level.ratio * self._promise_s(count, round(count * level.drafts)), level.tokens
        if at == own or self._plain.num_steps < _ENOUGH:
            return found
        plain = self._plain.ratio * self._promise_s(count), 1.0
        return min(found, plain, key=lambda each: each[0] / each[1])

    def _learn(self, step: "_Step", seconds: float) -> None:
        promised_s = self._promise_s(step.num_sequences, step.num_drafts, step.kv_tokens)
        level = self._levels[step.num_sequences.bit_length()]
        if not step.num_prompt_rows:
            for each in (level, self._plain) if not step.num_drafts else (level,):
                each.add(
                    min(seconds / promised_s, _OUTLIER * each.ratio),
                    tokens=step.num_tokens / step.num_sequences,
                    drafts=step.num_drafts / step.num_sequences,
                )
            context = step.kv_tokens / step.num_sequences
            self._context += (1 - _CONTEXT_KEPT) * (context - self._context)
            return
        rows = step.num_sequences + step.num_drafts + step.num_prompt_rows
        rows_s = self._costs.step_s(rows, step.kv_tokens, step.kv_row_tokens) - promised_s
        extra_s = max(seconds - promised_s * level.ratio, 0.0)
        self._prompt_s = _PROMPT_KEPT * self._prompt_s + min(extra_s, _OUTLIER * rows_s)
        self._promised_s = _PROMPT_KEPT * self._promised_s + rows_s

    def _promise_s(self, num_sequences: int, num_drafts: int = 0, kv_tokens: int | None = None) -> float:
        """Return the promise for a step by its decoding sequences and the draft rows that it verifies."""
        if kv_tokens is None:
            kv_tokens = round(num_sequences * self._context)
        return self._costs.step_s(num_sequences + num_drafts, kv_tokens, num_drafts * kv_tokens // num_sequences)


class _Step(NamedTuple):
    """num_prompt_rows: beyond one for each sequence and the drafts."""

    num_sequences: int
    num_prompt_rows: int
    num_drafts: int
    num_tokens: int
    kv_tokens: int
    kv_row_tokens: int


class _Level:
    """Averages of steps without prompts: measured over promised seconds; tokens and drafts of each sequence."""

    __slots__ = ("drafts", "num_steps", "ratio", "tokens")

    def __init__(self) -> None:
        self.num_steps = 0
        self.ratio = self.tokens = 1.0
        self.drafts = 0.0

    def add(self, ratio: float, *, tokens: float, drafts: float) -> None:
        self.num_steps += 1
        weight = 1 / min(self.num_steps, _STEPS_KEPT)
        self.ratio += weight * (ratio - self.ratio)
        self.tokens += weight * (tokens - self.tokens)
        self.drafts += weight * (drafts - self.drafts)


def anchors(most: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, 16, … up to most, which is the last one."""
    found = {
        most,
        *(each for power in range(most.bit_length()) for each in (1 << power, 3 << power) if each < most),
    }
    return tuple(sorted(found))


def _with_rows(
    costs: CostModel,
    sequences: tuple[int, ...],
    step_s: Many[float],
    tokens: Many[float],
    most_rows: int,
    factor: float = 1.0,
    *,
    catches_up: bool = False,
) -> Pace:
    """factor: on the seconds that rows of prompts take. catches_up: the draft model computes prompts as well."""
    rows = anchors(most_rows + sequences[-1])
    return Pace(
        sequences=sequences,
        step_s=tuple(step_s),
        tokens=tuple(tokens),
        rows=rows,
        rows_s=tuple(factor * (costs.step_s(each) + costs.pass_s(each) * catches_up) for each in rows),
        most_rows=most_rows,
        row_token_s=factor * costs.row_token_s,
    )
