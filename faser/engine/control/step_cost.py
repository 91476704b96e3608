"""What a step costs, in seconds: CostModel. Policies weigh drafts with it.

The data plane measures tables of step times before the first request (StepTimes). Four things follow the machine
from then on: a factor on the times of each role, the price of draft rows within a step (RowFactor), how many
experts of a mixture its rows read (ExpertPrice), and the gaps that the host leaves between steps (HostGaps).
Control plane, no torch.
"""

from bisect import bisect_left
from enum import IntEnum
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from faser.engine.contract.step_times import CostTable, ExpertCosts, Role, StepTimes
from faser.types import STEP_ERROR_EDGES, RoleStats

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_OUTLIER = 3.0  # a measurement counts as at most this many times off: a page fault, a pause is no new machine

_FOLLOW_STEPS = 0.1  # weight of the newest step in the factor of its role
_LARGEST_FACTOR = 20.0
_FIRST_DENSE_ROWS = 2048
_FREE = CostTable(rows=(1,), seconds=(0.0,))  # of a role that the engine does not have

_KEPT = 0.99  # of what is known of draft rows after one more step: 100 steps count
_PRIOR = 0.01  # steps of draft rows alone that the table is worth: three rows are a fortieth of a step, or less
_PRIOR_ROWS = 1.0  # rows, squared, of a step that are worth what the table knows of experts
_NEARLY_ALL = 0.95  # of the experts
_DRAFT_SHARE = 0.6  # before any step says so: 5 rows of one sequence read 3.2 times the experts (vLLM issue 46295)
_LEAST_ROW_FACTOR, _MOST_ROW_FACTOR = 0.8, 4.0
_OF_OTHER_LEVEL = 0.1  # what is known of draft rows at one level of load, at a level without any steps so far

# Seconds between steps, for a step and for each of its sequences, by GapKind. DRAFTED and OVERLAPPED are lines
# through the gaps of 1, 16 and 64 sequences in benchmarks/results/host-gap.json (1.1, 1.4, 2.2 ms and 0.8, 1.1,
# 1.7 ms). UNASKED and ASKED come from the same benchmark with the policy asked in every fifth step. AHEAD is
# UNASKED, all of it hidden.
_USUAL = ((0.5e-3, 5e-6), (0.5e-3, 5e-6), (0.8e-3, 5e-6), (1.1e-3, 17e-6), (0.8e-3, 14e-6))
_EXPOSED = (0.0, 1.0, 1.0, 1.0, 1.0)  # share of the usual gap, before it is measured
_FOLLOW_GAPS = 0.05  # weight of the newest gap, once there are enough
_PRIOR_STEPS = 4  # the usual gap counts as this many measured ones: after 16 steps it weighs a fifth


class CostModel:
    """Measured step times, corrected online. Policies read it; the control of speculation calls `observe`.

    pass_s: seconds of one forward of the draft model, by rows; 0 without a draft model. text_s: seconds to look up
    drafts, by sequences; 0 without a text look-up. host_gaps: what the host adds between steps.
    """

    def __init__(self, times: StepTimes, *, schedules_async: bool = False) -> None:
        self.tables = times.tables
        self.host_gaps = HostGaps(schedules_async=schedules_async)
        self._roles = {role: RoleCost(table) for role, table in times.tables.items()}
        self._step = self._roles[Role.STEP]
        self.pass_s = self._roles.get(Role.PASS) or RoleCost(_FREE)
        self.text_s = self._roles.get(Role.TEXT) or RoleCost(_FREE)
        self._row_factors: dict[int, RowFactor] = {}  # by level of load
        self._newest = RowFactor()  # of these
        experts = self._step.table.experts
        self._experts = None if experts is None else ExpertPrice(experts)
        self._counts = np.arange(float(_FIRST_DENSE_ROWS))  # 0, 1, 2, …

    @property
    def has_passes(self) -> bool:
        """Drafting takes a forward of a model per token."""
        return Role.PASS in self.tables

    @property
    def row_token_s(self) -> float:
        """Seconds for each earlier token that a further row of a sequence attends to."""
        return self._step.table.kv_row_token_s * self._step.factor

    def factor(self, role: Role) -> float:
        """How many times slower than its table the role is now."""
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

    def by_table_s(self, rows: int, kv_tokens: int = 0) -> float:
        """The same as it was measured at the start, whatever steps take now, and without a mixture's experts."""
        return self._step.by_table(rows) + self._step.table.kv_token_s * kv_tokens

    def steps_s(self, fewest: int, most: int, kv_tokens: int = 0, row_context: float = 0.0) -> Floats:
        """[most - fewest + 1] seconds of steps of fewest … most rows; kv_tokens as in step_s.

        The rows beyond the fewest are draft rows. row_context: cached tokens that each of these attends to.
        """
        step, most_drafts = self._step, most - fewest
        if most_drafts >= len(self._counts):
            self._counts = np.arange(2.0 * most_drafts + 2.0)
        factor = step.factor * self._row_factor(fewest).factor
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
        """What the table says of a step without prompts, draft_rows of whose rows are draft tokens; as step_s."""
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
        """How long such a step takes now."""
        rows = self._row_factor(verification.rows - verification.draft_rows)
        return (verification.without_s + verification.rows_s * rows.factor) * self._step.factor

    def observe_verification(
        self, verification: "VerificationCost", measured_s: float, *, experts: int = 0
    ) -> None:
        """Such a step has taken this long; with or without draft rows it tells what draft rows cost.

        experts: that it has read; 0: it has not counted them.
        """
        if self._experts is not None and experts:
            self._experts.add(verification.rows - verification.draft_rows, verification.draft_rows, experts)
        rows = self._row_factor(verification.rows - verification.draft_rows)
        rows.add(verification.without_s, verification.rows_s, measured_s)
        self._newest = rows

    def _row_factor(self, sequences: int) -> "RowFactor":
        """Of draft rows in steps of this many sequences: one for 1, for 2 and 3, for 4 … 7, and so on.

        Further rows of one sequence fit into a tile of the products and are nearly free; those of 16 are not.
        """
        level = sequences.bit_length()
        if (found := self._row_factors.get(level)) is None:
            found = self._row_factors[level] = self._newest.as_prior()
        return found

    def catchup_s(self, lag: Ints) -> Floats:
        """[S] seconds to refill `lag` missing tokens of draft KV, for each sequence by itself."""
        return np.maximum(self.pass_s(lag + 1) - self.pass_s(1), 0.0)

    def draft_s(self, lengths: Ints, lag: Ints, *, horizon: int = 1) -> float:
        """Seconds to draft `lengths` tokens, [S], for a step: one pass per token of the longest draft.

        lag: [S] missing tokens of draft KV. horizon: number of steps over which the time to refill them is spread.
        """
        count = int(np.count_nonzero(lengths))
        if not count:
            return 0.0
        total_s = self.text_s(count)
        if not self.has_passes:
            return total_s
        total_s += float(np.add.reduce(self.pass_s(_going(lengths))))
        missing = int(np.add.reduce(lag[lengths > 0])) if np.count_nonzero(lag) else 0
        if missing:
            total_s += (self.pass_s(count + missing) - self.pass_s(count)) / horizon
        return total_s

    def observe(self, role: Role | str, predicted_s: float, measured_s: float) -> None:
        """Follow a role's measured time. predicted_s: with the factor at that time; 0 teaches nothing."""
        if predicted_s > 0 and measured_s > 0:
            self._roles[Role(role)].add(predicted_s, measured_s)

    def stats(self) -> tuple[RoleStats, ...]:
        return tuple(each.stats(role.value) for role, each in self._roles.items())


class VerificationCost(NamedTuple):
    """A step that verifies drafts, and what its draft rows and the rest of it take by the table, in seconds."""

    rows: int
    draft_rows: int
    without_s: float
    rows_s: float


def _going(lengths: Ints) -> Ints:
    """[max γ] sequences in pass 1, 2, … of drafts of these lengths."""
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
        """By the table, for 0 … most rows or more: it grows with the largest row count so far."""
        if most >= len(self._dense):
            self._dense = self.table.dense(2 * most)
        return self._dense


class RowFactor:
    """How many times dearer draft rows are now than their table says, compared with the rest of the step.

    The table was measured on an idle machine, batch by batch, and has no time for verifying drafts. Next to other
    programs a step is interrupted the more often the longer it computes, so its further rows slow down more than
    its first ones; a factor on the whole step would find drafts too cheap.

    Least squares with forgetting of measured ≈ a · base + b · rows, where b is near a before any
    data. factor: b / a.
    """

    __slots__ = ("_base_base", "_base_rows", "_base_time", "_rows_rows", "_rows_time", "_usual", "factor")

    def __init__(self) -> None:
        self.factor = 1.0
        self._usual = 0.0  # measured over predicted by the table
        self._base_base = self._base_rows = self._rows_rows = 0.0  # of the parts of the step, all of it being 1
        self._base_time = self._rows_time = 0.0

    def as_prior(self) -> "RowFactor":
        """The same, learned from a tenth as many steps."""
        prior = RowFactor()
        prior.factor, prior._usual = self.factor, self._usual
        for name in ("_base_base", "_base_rows", "_rows_rows", "_base_time", "_rows_time"):
            setattr(prior, name, _OF_OTHER_LEVEL * getattr(self, name))
        return prior

    def add(self, base_s: float, rows_s: float, measured_s: float) -> None:
        """A step whose draft rows take rows_s and the rest base_s, both by the table."""
        whole_s = base_s + rows_s
        base, rows, time = base_s / whole_s, rows_s / whole_s, measured_s / whole_s
        if self._usual:
            time = min(max(time, self._usual / _OUTLIER), self._usual * _OUTLIER)
        self._usual = time if not self._usual else self._usual + (1 - _KEPT) * (time - self._usual)
        self._base_base = self._base_base * _KEPT + base * base
        self._base_rows = self._base_rows * _KEPT + base * rows
        self._rows_rows = self._rows_rows * _KEPT + rows * rows
        self._base_time = self._base_time * _KEPT + base * time
        self._rows_time = self._rows_time * _KEPT + rows * time
        one, both, other = self._base_base + _PRIOR, self._base_rows - _PRIOR, self._rows_rows + _PRIOR
        scale = one * other - both * both
        of_base = (self._base_time * other - self._rows_time * both) / scale
        of_rows = (self._rows_time * one - self._base_time * both) / scale
        if of_base > 0:
            self.factor = min(max(of_rows / of_base, _LEAST_ROW_FACTOR), _MOST_ROW_FACTOR)


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
        """Of a step of this many rows and these draft rows in addition."""
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


class GapKind(IntEnum):
    """What a gap belongs to: a step that was launched ahead; one for which the policy was not asked; one for which
    it was, and no sequence drafts; one with drafts that were made before it; one with drafts made during it.
    """

    AHEAD = 0
    UNASKED = 1
    ASKED = 2
    DRAFTED = 3
    OVERLAPPED = 4


class HostGaps:
    """For how many seconds a step leaves the device without work, because the host has to work first.

        device                | drafts |               | step |
        host   decide, look up         | plan, prepare |      | commit, learn, hand over

    A step that is launched before the one in flight has ended has no gap. Another one has: deciding, planning and
    preparing inputs before it; committing it, learning from it and the hand-over to the front-end after it. A step
    with drafts always waits, so its gap is a cost of drafting. Asking the policy is a reason to wait as well.

    schedules_async: steps without drafts are launched ahead where they can be. Then gaps are the usual ones until
    they are measured. Otherwise all steps wait, only differences count, and they are 0 until they are measured.
    """

    def __init__(self, *, schedules_async: bool = False) -> None:
        self.schedules_async = schedules_async
        self._factors = [*_EXPOSED] if schedules_async else [0.0] * len(GapKind)  # measured over usual gap
        self._num_steps = [_PRIOR_STEPS if schedules_async else 0] * len(GapKind)  # that each factor stands for
        self._measured_unasked = False

    def observe(self, kind: GapKind, gap_s: float, num_sequences: int, *, deciding_s: float = 0.0) -> None:
        """A step of this kind had a gap, deciding_s of which went into deciding and learning.

        Until a step has been measured that waited without asking the policy, the others stand for it, less the
        time of deciding.
        """
        self._follow(kind, gap_s, num_sequences)
        if kind is GapKind.UNASKED:
            self._measured_unasked = True
        elif kind is not GapKind.AHEAD and not self._measured_unasked:
            self._follow(GapKind.UNASKED, gap_s - deciding_s, num_sequences)

    def drafting_s(self, num_sequences: int, *, hidden: bool, overlapped: bool = False) -> float:
        """By how much the gap of a step with drafts is longer than that of one without.

        hidden: the step without drafts would be launched ahead. overlapped: the drafts are made during the step.
        """
        kind = GapKind.OVERLAPPED if overlapped else GapKind.DRAFTED
        return self._extra_s(kind, num_sequences, hidden=hidden)

    def asking_s(self, num_sequences: int, *, hidden: bool) -> float:
        """By how much the gap of a step without drafts is longer where the policy is asked; hidden: as above."""
        return self._extra_s(GapKind.ASKED, num_sequences, hidden=hidden)

    def _extra_s(self, kind: GapKind, num_sequences: int, *, hidden: bool) -> float:
        plain = GapKind.AHEAD if hidden else GapKind.UNASKED
        return max(self._gap_s(kind, num_sequences) - self._gap_s(plain, num_sequences), 0.0)

    def _gap_s(self, kind: GapKind, num_sequences: int) -> float:
        return self._factors[kind] * _usual_s(kind, num_sequences)

    def _follow(self, kind: GapKind, gap_s: float, num_sequences: int) -> None:
        factor = self._factors[kind]
        most = _OUTLIER * max(factor, 1.0)
        measured = min(max(gap_s / _usual_s(kind, num_sequences), 0.0), most)
        self._num_steps[kind] += 1
        self._factors[kind] = factor + (measured - factor) * max(_FOLLOW_GAPS, 1 / self._num_steps[kind])


def _usual_s(kind: GapKind, num_sequences: int) -> float:
    fixed_s, sequence_s = _USUAL[kind]
    return fixed_s + sequence_s * num_sequences
