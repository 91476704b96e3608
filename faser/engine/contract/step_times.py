"""StepTimes: how long steps take on this machine.

The data plane measures them once, before the first request. The control plane builds its cost model from them and
corrects that model online; nothing here ever changes.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from faser.errors import ConfigError
from faser.files import parse_json, write_atomically
from faser.types.arrays import Floats, Ints

_Further = TypeVar("_Further", float, Floats)

_FORMAT = 6
_MOST_TILE_ROWS = 1000.0  # what one more tile is worth, at most, so that times rise within a tile too
_LEAST_S = 1e-12  # of a row


class Role(StrEnum):
    """step: target forward, logits, sampling. pass: one forward of a draft model. text: one text look-up."""

    STEP = "step"
    PASS = "pass"
    TEXT = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCosts:
    """Costs that a mixture's experts add to a step, each by itself in every layer.

    total: experts of all layers. per_row: of these, that one row passes. expert_s: seconds to read one more.
    row_share: a further row reads as many new ones as this share of a row that chooses without regard to the
    others would. Raises ConfigError for numbers out of range.
    """

    total: int
    per_row: int
    expert_s: float
    row_share: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.per_row < self.total:
            raise ConfigError(f"a row passes {self.per_row} of {self.total} experts; it must be fewer, and some")
        for name in ("expert_s", "row_share"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ConfigError(f"the {name} of experts is {value}; it must be a number from 0 on")

    def read(self, further: _Further) -> _Further:
        """Experts that rows of a step pass: one row, and `further` ones that choose without regard to others."""
        missed: _Further = self._missed**further
        return self.total - (self.total - self.per_row) * missed

    def further(self, read: float) -> float:
        """The inverse of `read`, up to all experts but a half of one."""
        most = self.total - 0.5
        return math.log((self.total - min(read, most)) / (self.total - self.per_row)) / math.log(self._missed)

    def slope(self, further: float) -> float:
        """Experts that one more such row adds."""
        return -math.log(self._missed) * (self.total - self.read(further))

    @property
    def _missed(self) -> float:
        """The probability that a row does not pass an expert."""
        return 1 - self.per_row / self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Seconds by row count. rows ascend; time rises steadily between two of them and goes on above the last.

    edges: row counts that fill the tiles of the kernels, in ascending order. One row more begins another tile, so
    between two row counts time rises by rows and, at edges, by steps. seconds: without attention and experts.
    Attention adds kv_token_s for every cached token of every sequence, and, since each further row of a sequence
    attends to the same tokens again, kv_row_token_s for each of these rows and tokens. experts: what those of a
    mixture add; None where they are part of `seconds`, if there are any.
    Raises ConfigError for row counts and edges that do not ascend, and for times that fall or are not finite.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    kv_token_s: float = 0.0
    kv_row_token_s: float = 0.0
    experts: ExpertCosts | None = None
    edges: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(a >= b for a, b in pairwise((0, *self.edges))):
            raise ConfigError(f"the edges of a cost table are {list(self.edges)}; they must ascend from 1 or more")
        if not self.rows or len(self.rows) != len(self.seconds):
            raise ConfigError(f"a cost table has {len(self.rows)} row counts and {len(self.seconds)} times")
        if self.rows[0] < 1 or any(a >= b for a, b in zip(self.rows, self.rows[1:], strict=False)):
            raise ConfigError(
                f"the row counts of a cost table are {list(self.rows)}; they must ascend from 1 or more"
            )
        if any(not 0 <= each < math.inf for each in (*self.seconds, self.kv_token_s, self.kv_row_token_s)):
            raise ConfigError("a cost table has a time that is not a number of seconds from 0 on")
        if any(a > b for a, b in zip(self.seconds, self.seconds[1:], strict=False)):
            raise ConfigError("a cost table has a time that falls where rows rise")

    @classmethod
    def measured(
        cls,
        seconds: Mapping[int, float],
        *,
        kv_token_s: float = 0.0,
        kv_row_token_s: float = 0.0,
        experts: ExpertCosts | None = None,
        edges: tuple[int, ...] = (),
    ) -> "CostTable":
        """Times by row count, made monotone by least squares, so that one slow time hides no slope."""
        rows = sorted(seconds)
        rising = np.maximum.accumulate(_isotonic([seconds[each] for each in rows]))  # removes what rounding leaves
        return cls(
            rows=tuple(rows),
            seconds=tuple(float(each) for each in rising),
            kv_token_s=kv_token_s,
            kv_row_token_s=kv_row_token_s,
            experts=experts,
            edges=edges,
        )

    def dense(self, num_rows: int) -> Floats:
        """Return the seconds [num_rows + 1] for 0 … num_rows rows; 0 rows take 0 seconds.

        The slope above the largest measured count is taken from half of that count on: the slope between the
        last two counts would be noise where these are neighbours.
        """
        wanted = np.arange(num_rows + 1)
        tile_rows = self._tile_rows()
        at, known = (each + tile_rows * self._tiles(each) for each in (wanted, np.array(self.rows)))
        found = np.interp(at, known, self.seconds)
        last = self.rows[-1]
        first = next(each for each in reversed(self.rows) if each <= last / 2 or each == self.rows[0])
        if last > first:
            rise = (self.seconds[-1] - self.seconds[self.rows.index(first)]) / (last - first)
            found[last + 1 :] += rise * (wanted[last + 1 :] - last)
        found[0] = 0.0
        return found

    def _tiles(self, rows: Ints) -> Ints:
        """Return how many tiles are full before the last of these rows; any shape."""
        return np.searchsorted(self.edges, rows)

    def _tile_rows(self) -> float:
        """Return the cost of beginning a tile, in rows of a tile that has room; 0 where that was not measured.

        From the edges that were measured on both sides, and from the rows between edges, but for the first tile's:
        while memory is the limit rows cost next to nothing.
        """
        rows = np.array(self.rows)
        more, begun, rise_s = np.diff(rows), np.diff(self._tiles(rows)), np.diff(self.seconds)
        at_edge, within = (more == 1) & (begun == 1), (begun == 0) & (self._tiles(rows[:-1]) > 0)
        if not (np.count_nonzero(at_edge) and np.count_nonzero(within)):
            return 0.0
        row_s = rise_s[within].sum() / more[within].sum()
        tile_s = max(rise_s[at_edge].mean() - row_s, 0.0)
        return float(min(tile_s / max(row_s, _LEAST_S), _MOST_TILE_ROWS))

    def seconds_at(self, rows: int, kv_tokens: int = 0, kv_row_tokens: int = 0) -> float:
        """Seconds for `rows` rows of sequences that have kv_tokens cached tokens in all.

        kv_row_tokens: cached tokens that the further rows of sequences attend to, added up over these rows.
        """
        found = self.dense(rows).item(rows) + self.kv_token_s * kv_tokens + self.kv_row_token_s * kv_row_tokens
        if self.experts is not None:
            found += self.experts.expert_s * self.experts.read(self.experts.row_share * (rows - 1))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """A table for each role that the engine has.

    measured_at: date and time, empty where nothing was measured. busy_share: 0 … 1, the part of the cores that
    other processes took meanwhile. Raises ConfigError without times of role step, and for a busy_share out of
    range.
    """

    tables: Mapping[Role, CostTable]
    measured_at: str = ""
    busy_share: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.busy_share <= 1:
            raise ConfigError(f"a cost model has a busy share of {self.busy_share}; it must be from 0 to 1")
        if Role.STEP not in self.tables:
            raise ConfigError("a cost model has no times of role step")

    @classmethod
    def proportional(
        cls,
        *,
        step_s: float,
        row_s: float = 0.0,
        kv_token_s: float = 0.0,
        kv_row_token_s: float = 0.0,
        pass_s: float | None = None,
        pass_row_s: float = 0.0,
        text_s: float | None = None,
        experts: ExpertCosts | None = None,
    ) -> "StepTimes":
        """step_s + row_s * rows, and attention; pass_s + pass_row_s * rows; text_s per sequence.

        For simulations. kv_token_s, kv_row_token_s, experts: as in CostTable.
        """
        tables = {Role.STEP: replace(_line(step_s, row_s, kv_token_s, kv_row_token_s), experts=experts)}
        if pass_s is not None:
            tables[Role.PASS] = _line(pass_s, pass_row_s)
        if text_s is not None:
            tables[Role.TEXT] = _line(0.0, text_s)
        return cls(tables=tables)

    def to_json(self) -> str:
        roles = {
            role.value: {
                "rows": table.rows,
                "seconds": table.seconds,
                "kv_token_s": table.kv_token_s,
                "kv_row_token_s": table.kv_row_token_s,
                "experts": table.experts and asdict(table.experts),
                "edges": table.edges,
            }
            for role, table in self.tables.items()
        }
        content = {
            "format": _FORMAT,
            "measured_at": self.measured_at,
            "busy_share": self.busy_share,
            "roles": roles,
        }
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, *, source: str = "the cost model") -> "StepTimes":
        """Raises ConfigError that names source and what is wrong."""
        try:
            content = parse_json(text)
            return cls(
                tables=_read_tables(content),
                measured_at=str(content["measured_at"]),
                busy_share=float(content["busy_share"]),
            )
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ConfigError(f"{source} is not a cost model: {type(error).__name__}: {error}") from error

    def save(self, path: Path) -> None:
        """Raises ConfigError."""
        try:
            write_atomically(path, self.to_json())
        except OSError as error:
            raise ConfigError(f"the cost model cannot be written to {path}: {error.strerror or error}") from error

    @classmethod
    def load(cls, path: Path) -> "StepTimes":
        """Raises ConfigError that names the file."""
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"the cost model cannot be read from {path}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"the cost model cannot be read from {path}: {error}") from error
        return cls.from_json(text, source=str(path))


def _line(fixed_s: float, row_s: float, kv_token_s: float = 0.0, kv_row_token_s: float = 0.0) -> CostTable:
    return CostTable(
        rows=(1, 2),
        seconds=(fixed_s + row_s, fixed_s + 2 * row_s),
        kv_token_s=kv_token_s,
        kv_row_token_s=kv_row_token_s,
    )


def _read_tables(content: Any) -> dict[Role, CostTable]:
    if content["format"] != _FORMAT:
        raise ConfigError(f"its format is {content['format']}; this version reads {_FORMAT}")
    return {
        Role(name): CostTable(
            rows=tuple(int(each) for each in table["rows"]),
            seconds=tuple(float(each) for each in table["seconds"]),
            kv_token_s=float(table["kv_token_s"]),
            kv_row_token_s=float(table["kv_row_token_s"]),
            experts=ExpertCosts(**table["experts"]) if table.get("experts") else None,
            edges=tuple(int(each) for each in table.get("edges", ())),
        )
        for name, table in content["roles"].items()
    }


def _isotonic(values: Sequence[float]) -> list[float]:
    """The nearest sequence that never falls: falling neighbours become their mean (pool-adjacent-violators)."""
    pools: list[tuple[float, int]] = []  # sum, count
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] * pools[-1][1] > pools[-1][0] * pools[-2][1]:
            (total, count), (before, counted) = pools.pop(), pools.pop()
            pools.append((before + total, counted + count))
    return [total / count for total, count in pools for _ in range(count)]
