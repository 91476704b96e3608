"""CostModel: how long a step takes, in seconds, by the rows that it has. Control plane, no torch.

Owns a factor per role that follows the machine online. The data plane measures the tables before the first request
(StepTimes); the engine reports how long steps really took.
"""

from bisect import bisect_left
from collections.abc import Mapping
from typing import overload

import numpy as np
from numpy.typing import NDArray

from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.control.timing.host_gap import HostGaps
from faser.engine.control.timing.row_factor import RowFactor
from faser.types import STEP_ERROR_EDGES, RoleStats

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_FOLLOW = 0.1  # weight of the newest step in the factor of its role
_OUTLIER = 3.0  # a step counts as at most this many times faster or slower: a page fault is no new machine
_LARGEST_FACTOR = 20.0
_FIRST_DENSE_ROWS = 2048


class CostModel:
    """Measured step times, corrected online. Policies read it; the control of speculation calls `observe`.

    host_gaps: what the host adds between steps.
    """

    def __init__(self, times: StepTimes, *, schedules_async: bool = False) -> None:
        self.host_gaps = HostGaps(schedules_async=schedules_async)
        self._tables = times.tables
        self._dense = {role: table.dense(_FIRST_DENSE_ROWS) for role, table in times.tables.items()}
        self._counts = np.arange(float(_FIRST_DENSE_ROWS))  # 0, 1, 2, …
        self._followed = {role: ErrorTracker() for role in times.tables}
        self._draft_rows = RowFactor()

    @property
    def has_passes(self) -> bool:
        """Drafting takes a forward of a model per token."""
        return Role.PASS in self._tables

    @property
    def tables(self) -> Mapping[Role, CostTable]:
        return self._tables

    def factor(self, role: Role) -> float:
        """How many times slower than its table the role is now."""
        return self._followed[role].factor

    @overload
    def step_s(self, rows: int, kv_tokens: int = 0, kv_row_tokens: int = 0) -> float: ...
    @overload
    def step_s(self, rows: Ints, kv_tokens: int = 0, kv_row_tokens: int = 0) -> Floats: ...
    def step_s(self, rows: int | Ints, kv_tokens: int = 0, kv_row_tokens: int = 0) -> float | Floats:
        """Seconds of a step of `rows` rows, whose sequences have kv_tokens cached tokens in all.

        kv_row_tokens: cached tokens that the further rows of sequences attend to, added up over these rows.
        """
        table = self._tables[Role.STEP]
        kv_s = table.kv_token_s * kv_tokens + table.kv_row_token_s * kv_row_tokens
        return (self._base_s(Role.STEP, rows) + kv_s) * self._followed[Role.STEP].factor

    def steps_s(self, fewest: int, most: int, kv_tokens: int = 0, row_context: float = 0.0) -> Floats:
        """[most - fewest + 1] seconds of steps of fewest … most rows; kv_tokens as in step_s.

        The rows beyond the fewest are draft rows. row_context: cached tokens that each of these attends to.
        """
        table = self._tables[Role.STEP]
        found = self._covering(Role.STEP, most)[fewest : most + 1] + table.kv_token_s * kv_tokens
        if row_s := table.kv_row_token_s * row_context:
            if len(found) > len(self._counts):
                self._counts = np.arange(2.0 * len(found))
            found += self._counts[: len(found)] * row_s
        factor, base_s = self._followed[Role.STEP].factor, found.item(0)
        found -= base_s
        found *= self._draft_rows.factor * factor
        found += base_s * factor
        return found

    def verification_s(self, rows: int, draft_rows: int, kv_tokens: int, kv_row_tokens: int) -> float:
        """Seconds of a step without prompts, draft_rows of whose rows are draft tokens; others as in step_s."""
        base_s, rows_s = self._parts_s(rows, draft_rows, kv_tokens, kv_row_tokens)
        return (base_s + rows_s * self._draft_rows.factor) * self._followed[Role.STEP].factor

    def observe_verification(
        self, rows: int, draft_rows: int, kv_tokens: int, kv_row_tokens: int, measured_s: float
    ) -> None:
        """Such a step has taken this long; with or without draft rows it tells what draft rows cost."""
        self._draft_rows.add(*self._parts_s(rows, draft_rows, kv_tokens, kv_row_tokens), measured_s)

    def _parts_s(self, rows: int, draft_rows: int, kv_tokens: int, kv_row_tokens: int) -> tuple[float, float]:
        """What the table says of the step without its draft rows, and of these."""
        table = self._tables[Role.STEP]
        without_s = self._base_s(Role.STEP, rows - draft_rows)
        rows_s = self._base_s(Role.STEP, rows) - without_s + table.kv_row_token_s * kv_row_tokens
        return without_s + table.kv_token_s * kv_tokens, rows_s

    @overload
    def pass_s(self, rows: int) -> float: ...
    @overload
    def pass_s(self, rows: Ints) -> Floats: ...
    def pass_s(self, rows: int | Ints) -> float | Floats:
        """Seconds of one forward of the draft model over `rows` rows; 0 without a draft model."""
        if not self.has_passes:
            return _nothing(rows)
        return self._base_s(Role.PASS, rows) * self._followed[Role.PASS].factor

    @overload
    def text_s(self, sequences: int) -> float: ...
    @overload
    def text_s(self, sequences: Ints) -> Floats: ...
    def text_s(self, sequences: int | Ints) -> float | Floats:
        """Seconds to look up drafts for `sequences` sequences; 0 without a text look-up."""
        if Role.TEXT not in self._tables:
            return _nothing(sequences)
        return self._base_s(Role.TEXT, sequences) * self._followed[Role.TEXT].factor

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
            self._followed[Role(role)].add(predicted_s, measured_s)

    def stats(self) -> tuple[RoleStats, ...]:
        return tuple(each.stats(role.value) for role, each in self._followed.items())

    @overload
    def _base_s(self, role: Role, rows: int) -> float: ...
    @overload
    def _base_s(self, role: Role, rows: Ints) -> Floats: ...
    def _base_s(self, role: Role, rows: int | Ints) -> float | Floats:
        """Seconds by the table alone. The dense table grows with the largest row count so far."""
        if isinstance(rows, np.ndarray):
            try:
                return self._dense[role].take(rows)
            except IndexError:
                return self._covering(role, int(rows.max())).take(rows)
        return self._covering(role, rows).item(rows)

    def _covering(self, role: Role, most: int) -> Floats:
        dense = self._dense[role]
        if most >= len(dense):
            dense = self._dense[role] = self._tables[role].dense(2 * most)
        return dense


class ErrorTracker:
    """Predicted and measured times of a role: factor c ← c + (c · measured / predicted - c) / 10, and errors."""

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
        moved = self.factor * (1 - _FOLLOW + _FOLLOW * ratio)
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


def _going(lengths: Ints) -> Ints:
    """[max γ] sequences in pass 1, 2, … of drafts of these lengths."""
    if len(lengths) == 1:
        return np.ones(lengths[0], dtype=np.int64)
    going: Ints = np.add.accumulate(np.bincount(lengths)[:0:-1])[::-1]
    return going


def _nothing(counts: int | Ints) -> float | Floats:
    return np.zeros(counts.shape) if isinstance(counts, np.ndarray) else 0.0
