"""The cost model: what a step takes, in seconds, by the rows it has. Control plane, no torch.

Owns a measured table per role, the slope for KV tokens read, and a factor per role that follows the machine
online. Does not measure: `profile` in the data plane fills the tables, the engine reports what steps took.
"""

import json
import os
import tempfile
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from faser.engine.contract.interference import FACTORS, InterferenceTable
from faser.engine.contract.step_times import CostTable, Role
from faser.errors import ConfigError
from faser.types import STEP_ERROR_EDGES, RoleStats

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_FORMAT = 4
_FOLLOW = 0.1  # weight of the newest step in the factor of its role
_FOLLOW_DECIDING = 0.05  # weight of the newest step in the host time of deciding
_OUTLIER = 3.0  # one step counts at most for so many times faster or slower: a page fault is no new machine
_LARGEST_FACTOR = 20.0
_FIRST_DENSE_ROWS = 2048


class CostModel:
    """Times of all roles. Read by policies, written by the engine through `observe`.

    lanes: what drafting beside a step costs, by share; none where it was not measured.
    """

    def __init__(self, tables: Mapping[Role, CostTable], lanes: tuple[InterferenceTable, ...] = ()) -> None:
        self._lanes = lanes
        self._deciding = [0.0, 0.0]  # host seconds of deciding in a step without drafts, and with drafts
        self._deciding_s = 0.0  # by how much the second is longer; see asking_s
        if Role.STEP not in tables:
            raise ConfigError("a cost model has no times of role step")
        self._tables = dict(tables)
        self._dense = {role: table.dense(_FIRST_DENSE_ROWS) for role, table in tables.items()}
        self._followed = {role: ErrorTracker() for role in tables}

    @classmethod
    def proportional(
        cls,
        *,
        step_s: float,
        row_s: float = 0.0,
        kv_token_s: float = 0.0,
        pass_s: float | None = None,
        pass_row_s: float = 0.0,
        text_s: float | None = None,
        lanes: tuple[InterferenceTable, ...] = (),
    ) -> "CostModel":
        """step_s + row_s * rows + kv_token_s * tokens; likewise a pass; text_s per sequence. For simulations."""
        tables = {Role.STEP: _line(step_s, row_s, kv_token_s)}
        if pass_s is not None:
            tables[Role.PASS] = _line(pass_s, pass_row_s)
        if text_s is not None:
            tables[Role.TEXT] = _line(0.0, text_s)
        return cls(tables, lanes)

    @property
    def has_passes(self) -> bool:
        """Drafting costs a pass of a model per token."""
        return Role.PASS in self._tables

    @property
    def lanes(self) -> tuple[InterferenceTable, ...]:
        return self._lanes

    @property
    def tables(self) -> Mapping[Role, CostTable]:
        return self._tables

    def factor(self, role: Role) -> float:
        """How many times slower than its table the role is at present."""
        return self._followed[role].factor

    @overload
    def step_s(self, rows: int, kv_tokens: int = 0) -> float: ...
    @overload
    def step_s(self, rows: Ints, kv_tokens: int = 0) -> Floats: ...
    def step_s(self, rows: int | Ints, kv_tokens: int = 0) -> float | Floats:
        """Seconds of a step with so many rows, whose sequences have kv_tokens in the cache together."""
        kv_s = self._tables[Role.STEP].kv_token_s * kv_tokens
        return (self._base_s(Role.STEP, rows) + kv_s) * self._followed[Role.STEP].factor

    def steps_s(self, fewest: int, most: int, kv_tokens: int = 0) -> Floats:
        """[most - fewest + 1] seconds of steps with fewest … most rows, else as step_s."""
        found = self._covering(Role.STEP, most)[fewest : most + 1] + self._tables[Role.STEP].kv_token_s * kv_tokens
        found *= self._followed[Role.STEP].factor
        return found

    @overload
    def pass_s(self, rows: int) -> float: ...
    @overload
    def pass_s(self, rows: Ints) -> Floats: ...
    def pass_s(self, rows: int | Ints) -> float | Floats:
        """Seconds of one pass of the draft model; 0 where drafts come from text."""
        if not self.has_passes:
            return _nothing(rows)
        return self._base_s(Role.PASS, rows) * self._followed[Role.PASS].factor

    @overload
    def text_s(self, sequences: int) -> float: ...
    @overload
    def text_s(self, sequences: Ints) -> Floats: ...
    def text_s(self, sequences: int | Ints) -> float | Floats:
        """Seconds of looking up drafts for so many sequences; 0 where only a model drafts."""
        if Role.TEXT not in self._tables:
            return _nothing(sequences)
        return self._base_s(Role.TEXT, sequences) * self._followed[Role.TEXT].factor

    @overload
    def asking_s(self, sequences: int) -> float: ...
    @overload
    def asking_s(self, sequences: Ints) -> Floats: ...
    def asking_s(self, sequences: int | Ints) -> float | Floats:
        """Seconds that asking so many sequences for drafts takes beside passes: looking up, deciding."""
        return self.text_s(sequences) + self._deciding_s

    def catchup_s(self, lag: Ints) -> Floats:
        """Seconds, for each sequence by itself, to refill `lag` tokens of the draft model's KV. [S]"""
        return np.maximum(self.pass_s(lag + 1) - self.pass_s(1), 0.0)

    def draft_s(self, lengths: Ints, lag: Ints, *, horizon: int = 1) -> float:
        """Seconds to draft `lengths` tokens, [S], of a step. horizon: catching up is spread over so many steps.

        One pass for each token of the longest draft, with the sequences that still go on.
        """
        count = int(np.count_nonzero(lengths))
        if not count:
            return 0.0
        total_s = self.text_s(count)
        if not self.has_passes:
            return total_s
        total_s += float(np.add.reduce(self.pass_s(_going(lengths))))
        behind = int(np.add.reduce(lag[lengths > 0])) if np.count_nonzero(lag) else 0
        if behind:
            total_s += (self.pass_s(count + behind) - self.pass_s(count)) / horizon
        return total_s

    def observe(self, role: Role | str, predicted_s: float, measured_s: float) -> None:
        """What was predicted, with the factor of the time, took measured_s. Nothing predicted: nothing learnt."""
        if predicted_s > 0 and measured_s > 0:
            self._followed[Role(role)].add(predicted_s, measured_s)

    def observe_deciding(self, measured_s: float, *, drafts: bool) -> None:
        """Deciding took so much host time in a step. What it takes longer with drafts is a cost of drafts."""
        usual_s = self._deciding[drafts]
        self._deciding[drafts] += (measured_s - usual_s) * (_FOLLOW_DECIDING if usual_s else 1.0)
        self._deciding_s = max(self._deciding[True] - self._deciding[False], 0.0)

    def stats(self) -> tuple[RoleStats, ...]:
        return tuple(each.stats(role.value) for role, each in self._followed.items())

    def to_json(self) -> str:
        """The tables; factors and statistics belong to one run."""
        roles = {
            role.value: {"rows": table.rows, "seconds": table.seconds, "kv_token_s": table.kv_token_s}
            for role, table in self._tables.items()
        }
        names = ("share", "rows", "contexts", *FACTORS)
        lanes = [{name: getattr(each, name) for name in names} for each in self._lanes]
        return json.dumps({"format": _FORMAT, "roles": roles, "lanes": lanes}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, *, source: str = "the cost model") -> "CostModel":
        """Raises ConfigError that names source and what is wrong."""
        try:
            content = json.loads(text)
            return cls(_read_tables(content), tuple(map(_read_lanes, content["lanes"])))
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{source} is not a cost model: {type(error).__name__}: {error}") from error

    def save(self, path: Path) -> None:
        """Written beside and moved into place: a reader never sees half of it. Raises ConfigError."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=path.parent, prefix=path.name, delete=False, encoding="utf-8"
            ) as file:
                file.write(self.to_json())
            os.replace(file.name, path)
        except OSError as error:
            raise ConfigError(f"the cost model cannot be written to {path}: {error}") from error

    @classmethod
    def load(cls, path: Path) -> "CostModel":
        """Raises ConfigError that names the file."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the cost model cannot be read from {path}: {error}") from error
        return cls.from_json(text, source=str(path))

    @overload
    def _base_s(self, role: Role, rows: int) -> float: ...
    @overload
    def _base_s(self, role: Role, rows: Ints) -> Floats: ...
    def _base_s(self, role: Role, rows: int | Ints) -> float | Floats:
        """By the table alone. The dense one grows when more rows are asked for."""
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
    """Predicted against measured as it goes: factor, c ← c + (measured c / predicted - c) / 10, and errors."""

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
    """[max γ] sequences in pass 1, 2, … of a draft of lengths."""
    if len(lengths) == 1:
        return np.ones(lengths[0], dtype=np.int64)
    going: Ints = np.add.accumulate(np.bincount(lengths)[:0:-1])[::-1]
    return going


def _nothing(counts: int | Ints) -> float | Floats:
    return np.zeros(counts.shape) if isinstance(counts, np.ndarray) else 0.0


def _line(fixed_s: float, row_s: float, kv_token_s: float = 0.0) -> CostTable:
    return CostTable(rows=(1, 2), seconds=(fixed_s + row_s, fixed_s + 2 * row_s), kv_token_s=kv_token_s)


def _read_tables(value: Any) -> dict[Role, CostTable]:
    if value["format"] != _FORMAT:
        raise ConfigError(f"its format is {value['format']}; this version reads {_FORMAT}")
    return {
        Role(name): CostTable(
            rows=tuple(int(each) for each in table["rows"]),
            seconds=tuple(float(each) for each in table["seconds"]),
            kv_token_s=float(table["kv_token_s"]),
        )
        for name, table in value["roles"].items()
    }


def _read_lanes(value: Any) -> InterferenceTable:
    matrices = {name: tuple(tuple(float(factor) for factor in line) for line in value[name]) for name in FACTORS}
    return InterferenceTable(
        share=float(value["share"]),
        rows=tuple(int(each) for each in value["rows"]),
        contexts=tuple(int(each) for each in value["contexts"]),
        **matrices,
    )
