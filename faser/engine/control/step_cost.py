"""Cost of a step, in seconds: CostModel. Policies weigh drafts with it.

The data plane measures tables of step times before the first request (StepTimes). Three things follow the machine
from then on: a factor on the times of each role, how many experts of a mixture a step's rows read (ExpertPrice),
and the price of draft rows and of the host's work for drafts (StepPosterior). Control plane, no torch.
"""

from bisect import bisect_left
from typing import NamedTuple, overload

import numpy as np

from faser.engine.contract.step_times import CostTable, ExpertCosts, Role, StepTimes
from faser.engine.control.step_posterior import StepPosterior
from faser.types.arrays import Floats, Ints
from faser.types.statistics import STEP_ERROR_EDGES, RoleStats

# Reasoned, not fitted: how throughput changes with each halved or doubled is in results/control-constants.json.
_OUTLIER = 3.0  # a measurement counts as at most this many times off: a page fault, a pause is no new machine

_OFTEN_S, _MOST_SKIPPED = 0.03, 3  # times are learned about this often, and at least from one step in 4
_FOLLOW_STEPS = 0.1  # weight of the newest step in the factor of its role
_LARGEST_FACTOR = 20.0  # of measured over predicted: a bound that no simulated run reaches
_FIRST_DENSE_ROWS = 2048  # up to which predictions are kept as a table
_FREE = CostTable(rows=(1,), seconds=(0.0,))  # of a role that the engine does not have

_KEPT = 0.99  # of what is known of experts after one more step: 100 steps count
_PRIOR_ROWS = 1.0  # rows, squared, of a step that are worth what the table knows of experts
_NEARLY_ALL = 0.95  # of the experts
_DRAFT_SHARE = 0.6  # before any step says so: 5 rows of one sequence read 3.2 times the experts (vLLM issue 46295)


class CostModel:
    """Measured step times, corrected online. Policies read it; the control of speculation calls `observe`.

    pass_s: seconds of one forward of the draft model, by rows; 0 without a draft model. text_s: seconds to look up
    drafts, by sequences; 0 without a text look-up. posterior: of draft rows and host work.
    block_tokens: the most tokens that one forward drafts, each as a row of it; None: a forward drafts one token.
    """

    def __init__(
        self, times: StepTimes, *, schedules_async: bool = False, block_tokens: int | None = None
    ) -> None:
        self.tables = times.tables
        self.block_tokens = block_tokens
        self.posterior = StepPosterior(schedules_async=schedules_async)
        self._roles = {role: RoleCost(table) for role, table in times.tables.items()}
        self._step = self._roles[Role.STEP]
        self.pass_s = self._roles.get(Role.PASS) or RoleCost(_FREE)
        self.text_s = self._roles.get(Role.TEXT) or RoleCost(_FREE)
        experts = self._step.table.experts
        self._experts = None if experts is None else ExpertPrice(experts)
        self._counts = np.arange(float(_FIRST_DENSE_ROWS))  # 0, 1, 2, …

    @property
    def has_passes(self) -> bool:
        """Drafting takes a forward of a model per token."""
        return Role.PASS in self.tables

    @property
    def in_blocks(self) -> bool:
        """One forward drafts all tokens."""
        return self.block_tokens is not None

    @property
    def row_token_s(self) -> float:
        """Seconds for each earlier token that a further row of a sequence attends to."""
        return self._step.table.kv_row_token_s * self._step.factor

    def factor(self, role: Role) -> float:
        """Return how many times slower than its table the role is now."""
        return self._roles[role].factor

    @overload
    def step_s(self, rows: int, kv_tokens: int = 0, kv_row_tokens: int = 0) -> float: ...
    @overload
    def step_s(self, rows: Ints, kv_tokens: int = 0, kv_row_tokens: int = 0) -> Floats: ...
    def step_s(self, rows: int | Ints, kv_tokens: int = 0, kv_row_tokens: int = 0) -> float | Floats:
        """Seconds of a step of `rows` rows, whose sequences have kv_tokens cached tokens in all.

        kv_row_tokens: cached tokens that the further rows of sequences attend to, added up over these rows.
        """
        step = self._step
        found = step.by_table(rows)
        found += step.table.kv_token_s * kv_tokens + step.table.kv_row_token_s * kv_row_tokens
        if self._experts is not None:
            found += self._experts.seconds(rows)
        return found * step.factor

    def by_table_s(self, rows: int, kv_tokens: int = 0, kv_row_tokens: int = 0) -> float:
        """The same as it was measured at the start, whatever steps take now, and without a mixture's experts."""
        table = self._step.table
        return self._step.by_table(rows) + table.kv_token_s * kv_tokens + table.kv_row_token_s * kv_row_tokens

    def steps_s(
        self, fewest: int, most: int, kv_tokens: int = 0, row_context: float = 0.0, *, sequences: int | None = None
    ) -> Floats:
        """Return the seconds [most - fewest + 1] of steps of fewest … most rows; kv_tokens as in step_s.

        The rows beyond the fewest are draft rows. row_context: cached tokens that each of these attends to.
        sequences: that decode; None: one for each of the fewest rows, so there are no prompts.
        """
        step, most_drafts = self._step, most - fewest
        if most_drafts >= len(self._counts):
            self._counts = np.arange(2.0 * most_drafts + 2.0)
        factor = step.factor * self.posterior.row_factor(fewest if sequences is None else sequences)
        found: Floats = step.up_to(most)[fewest : most + 1] * factor
        base_s = step.by_table(fewest)
        rest_s = (base_s + step.table.kv_token_s * kv_tokens) * step.factor - base_s * factor
        if self._experts is not None:
            experts_s = self._experts.seconds(fewest, self._counts[: most_drafts + 1])
            found += experts_s * factor
            rest_s += experts_s.item(0) * (step.factor - factor)
        if row_s := step.table.kv_row_token_s * row_context * factor:
            found += self._counts[: most_drafts + 1] * row_s
        found += rest_s
        return found

    def verification(self, rows: int, draft_rows: int, kv_tokens: int, kv_row_tokens: int) -> "VerificationCost":
        """Look up the cost of a step without prompts, draft_rows of whose rows are draft tokens; as step_s."""
        step = self._step
        without_s = step.by_table(rows - draft_rows)
        rows_s = 0.0
        if draft_rows:
            rows_s = step.by_table(rows) - without_s + step.table.kv_row_token_s * kv_row_tokens
        if self._experts is not None:
            experts_s = self._experts.seconds(rows - draft_rows)
            rows_s += self._experts.seconds(rows - draft_rows, draft_rows) - experts_s
            without_s += experts_s
        return VerificationCost(rows, draft_rows, without_s + step.table.kv_token_s * kv_tokens, rows_s)

    def seconds(self, verification: "VerificationCost") -> float:
        """Return how long such a step takes now."""
        row_factor = self.posterior.row_factor(verification.rows - verification.draft_rows)
        return (verification.without_s + verification.rows_s * row_factor) * self._step.factor

    def observe_verification(
        self, verification: "VerificationCost", measured_s: float, *, experts: int = 0
    ) -> None:
        """Such a step has taken this long; with or without draft rows it tells what draft rows cost.

        experts: that it has read; 0: it has not counted them.
        """
        sequences = verification.rows - verification.draft_rows
        if self._experts is not None and experts:
            self._experts.add(sequences, verification.draft_rows, experts)
        self.posterior.observe_rows(sequences, verification.without_s, verification.rows_s, measured_s)

    def passes_s(self, going: Ints) -> Floats:
        """Return the seconds [S, K] of forwards that draft 1 … K tokens. going: [S, K] sequences in each."""
        if not self.in_blocks:
            return np.add.accumulate(self.pass_s(going), axis=1)
        # The row of the anchor, or of the states of the token that was committed last, is one more for each.
        return self.pass_s(np.add.accumulate(going, axis=1) + going[:, :1])

    def catchup_s(self, lag: Ints) -> Floats:
        """Return the seconds [S] to refill `lag` missing tokens of draft KV, for each sequence by itself."""
        return np.maximum(self.pass_s(lag + 1) - self.pass_s(1), 0.0)

    def draft_s(self, lengths: Ints, lag: Ints, *, horizon: int = 1) -> float:
        """Seconds to draft `lengths` tokens, [S], for a step: see passes_s.

        lag: [S] missing tokens of draft KV. horizon: number of steps over which the time to refill them is spread.
        """
        count = int(np.count_nonzero(lengths))
        if not count:
            return 0.0
        total_s = self.text_s(count)
        if not self.has_passes:
            return total_s
        total_s += self.passes_s(_going(lengths)[None]).item(-1)
        missing = int(lag[lengths > 0].sum()) if np.count_nonzero(lag) else 0
        if missing:
            total_s += (self.pass_s(count + missing) - self.pass_s(count)) / horizon
        return total_s

    def observe(self, role: Role | str, predicted_s: float, measured_s: float) -> None:
        """Follow a role's measured time. predicted_s: with the factor at that time; 0 teaches nothing."""
        if predicted_s > 0 and measured_s > 0:
            self._roles[Role(role)].add(predicted_s, measured_s)

    def stats(self) -> tuple[RoleStats, ...]:
        return tuple(each.stats(role.value) for role, each in self._roles.items())


def steps_to_skip(seconds: float) -> int:
    """Return how many steps after one that took this long teach nothing about times.

    Short steps follow each other so fast that to learn from each costs a share of them, and brings little.
    """
    return min(_MOST_SKIPPED, int(_OFTEN_S / seconds)) if seconds > 0 else 0


class VerificationCost(NamedTuple):
    """A step that verifies drafts, and what its draft rows and the rest of it take by the table, in seconds."""

    rows: int
    draft_rows: int
    without_s: float
    rows_s: float


def _going(lengths: Ints) -> Ints:
    """Return how many sequences are in pass 1, 2, … of drafts of these lengths: [max γ]."""
    if len(lengths) == 1:
        return np.ones(lengths[0], dtype=np.int64)
    going: Ints = np.add.accumulate(np.bincount(lengths)[:0:-1])[::-1]
    return going


class ErrorTracker:
    """Predicted and measured times: factor c ← c + (c · measured / predicted - c) / 10, and errors."""

    __slots__ = ("errors", "factor", "measured_s", "predicted_s")

    def __init__(self) -> None:
        self.factor = 1.0
        self.predicted_s = 0.0
        self.measured_s = 0.0
        self.errors = [0] * (len(STEP_ERROR_EDGES) + 1)

    def add(self, predicted_s: float, measured_s: float) -> None:
        self.predicted_s += predicted_s
        self.measured_s += measured_s
        error = abs(predicted_s - measured_s) / measured_s
        self.errors[bisect_left(STEP_ERROR_EDGES, error)] += 1
        ratio = min(max(measured_s / predicted_s, 1 / _OUTLIER), _OUTLIER)
        moved = self.factor * (1 - _FOLLOW_STEPS + _FOLLOW_STEPS * ratio)
        self.factor = min(max(moved, 1 / _LARGEST_FACTOR), _LARGEST_FACTOR)

    def forget(self, weight: float) -> None:
        """Move the factor back towards 1 by this part of the way: what it was learned from is out of date."""
        self.factor += weight * (1 - self.factor)

    def stats(self, role: str) -> RoleStats:
        return RoleStats(
            role=role,
            predicted_s=self.predicted_s,
            measured_s=self.measured_s,
            errors=tuple(self.errors),
        )


class RoleCost(ErrorTracker):
    """Seconds of a role by row count: those of its table, times the factor that follows the machine."""

    __slots__ = ("_dense", "table")

    def __init__(self, table: CostTable) -> None:
        super().__init__()
        self.table = table
        self._dense = table.dense(_FIRST_DENSE_ROWS)

    @overload
    def __call__(self, rows: int) -> float: ...
    @overload
    def __call__(self, rows: Ints) -> Floats: ...
    def __call__(self, rows: int | Ints) -> float | Floats:
        return self.by_table(rows) * self.factor

    @overload
    def by_table(self, rows: int) -> float: ...
    @overload
    def by_table(self, rows: Ints) -> Floats: ...
    def by_table(self, rows: int | Ints) -> float | Floats:
        if isinstance(rows, np.ndarray):
            try:
                return self._dense.take(rows)
            except IndexError:
                return self.up_to(int(rows.max())).take(rows)
        return self.up_to(rows).item(rows)

    def up_to(self, most: int) -> Floats:
        """Return the table's seconds for 0 … most rows or more: it grows with the largest row count so far."""
        if most >= len(self._dense):
            self._dense = self.table.dense(2 * most)
        return self._dense


class ExpertPrice:
    """Seconds that a mixture's experts add to a step, by how many of them its rows have read lately.

    Tokens near each other choose alike: a draft row reads fewer new experts than a row of another sequence, and
    either reads other ones than the dummy rows that the table was measured with. How many new ones, as a share of
    a row's that chooses without regard to the others, is fitted to the counts of real steps: least squares with
    forgetting, in experts. Steps that read nearly all experts teach nothing.
    """

    __slots__ = ("_costs", "_prior", "_products", "_rows", "_shares")

    def __init__(self, costs: ExpertCosts) -> None:
        self._costs = costs
        # Of a row of another sequence, of a draft row.
        self._shares = self._prior = costs.row_share * np.array([1.0, _DRAFT_SHARE])
        self._rows, self._products = np.zeros((2, 2)), np.zeros(2)  # normal equations

    @overload
    def seconds(self, rows: int, drafts: int = 0) -> float: ...
    @overload
    def seconds(self, rows: Ints, drafts: int = 0) -> Floats: ...
    @overload
    def seconds(self, rows: int, drafts: Floats) -> Floats: ...
    def seconds(self, rows: int | Ints, drafts: int | Floats = 0) -> float | Floats:
        """Return the seconds to read the experts of a step of this many rows and these draft rows in addition."""
        other, draft = self._shares.tolist()
        read: float | Floats = self._costs.read(other * (rows - 1) + draft * drafts)
        return self._costs.expert_s * read

    def add(self, rows: int, drafts: int, read: int) -> None:
        """Fit the shares to a step of `rows` rows and `drafts` draft rows, which has read `read` experts."""
        if read > _NEARLY_ALL * self._costs.total:
            return
        further = self._costs.further(read)
        weight = (self._costs.slope(further) / self._costs.per_row) ** 2
        both = np.array([rows - 1.0, drafts])
        self._rows = _KEPT * self._rows + weight * np.outer(both, both)
        self._products = _KEPT * self._products + weight * further * both
        found = np.linalg.solve(self._rows + _PRIOR_ROWS * np.eye(2), self._products + _PRIOR_ROWS * self._prior)
        self._shares = np.maximum(found, 0.0)
