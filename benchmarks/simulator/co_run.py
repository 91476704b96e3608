"""InterferenceTable: how much longer lanes take that run at once, on a simulated machine. No engine knows it."""

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from faser.errors import ConfigError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Matrix = tuple[tuple[float, ...], ...]  # [contexts][rows]

FACTORS = ("verify", "draft", "verify_alone", "draft_alone")


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceTable:
    """Factors by which verification and drafting take longer concurrently than alone on all processors.

    Factors, about 1 or more, for every pair of rows and contexts: two lanes that both wait for memory share its
    bandwidth, and a lane that computes leaves the bandwidth to the other one.

    share: the draft lane's part of the processors, in (0, 1). rows: of the target's step, whose sequences the
    concurrent drafts are for. contexts: cached tokens of each sequence. Both ascend.
    verify, draft: while the other lane is busy. verify_alone, draft_alone: on the lane's own processors while the
    other lane is idle. verify, draft, verify_alone / verify and draft_alone / draft are interpolated linearly over
    the logarithms of rows and contexts, and are constant beyond the ends. Raises ConfigError for numbers out of
    range.
    """

    share: float
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    verify: Matrix
    draft: Matrix
    verify_alone: Matrix
    draft_alone: Matrix
    _dense: Floats = field(init=False, repr=False, compare=False)  # _by_row()

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ConfigError(f"a draft lane's share is {self.share}; it must lie between 0 and 1")
        for name, points in (("rows", self.rows), ("contexts", self.contexts)):
            if not points or points[0] < 1 or any(a >= b for a, b in pairwise(points)):
                raise ConfigError(f"the {name} of a co-run are {list(points)}; they must ascend from 1 or more")
        for name in FACTORS:
            self._check(name, getattr(self, name))
        object.__setattr__(self, "_dense", self._by_row())

    @classmethod
    def constant(
        cls, *, share: float, verify: float, draft: float, verify_alone: float, draft_alone: float
    ) -> "InterferenceTable":
        """Return a table with one pair of factors for all steps."""
        return cls(
            share=share,
            rows=(1,),
            contexts=(1,),
            verify=((verify,),),
            draft=((draft,),),
            verify_alone=((verify_alone,),),
            draft_alone=((draft_alone,),),
        )

    def factors(self, rows: Ints, context: float) -> Floats:
        """Return [4, *rows.shape]: verify, draft, and the factor on each of these once the other lane is idle.

        rows: of the step. context: cached tokens, the mean over its sequences.
        """
        found: Floats = self._at(context).take(rows, axis=1, mode="clip")
        return found

    def seconds(self, verify_s: Floats, draft_s: Floats, rows: Ints, context: float) -> Floats:
        """Seconds from the start of both lanes until both are done. verify_s, draft_s: alone on all processors.

        rows, context: as in factors; the three arrays broadcast. The lanes slow each other down until one is done;
        then the other one runs alone.
        """
        verify, draft, verify_eased, draft_eased = self.factors(rows, context)
        verify_s, draft_s = verify_s * verify, draft_s * draft
        longer_s = verify_s - draft_s
        rest_s: Floats = np.maximum(longer_s * verify_eased, longer_s * -draft_eased)
        return np.minimum(verify_s, draft_s) + rest_s

    def one(self, verify_s: float, draft_s: float, *, rows: int, context: float) -> float:
        """Return the seconds of a single step."""
        return float(self.seconds(np.array(verify_s), np.array(draft_s), np.array(rows), context))

    def _at(self, context: float) -> Floats:
        """Return the factors of 0 … the largest row count: [4, rows], as in factors."""
        above = bisect_right(self.contexts, context)
        if above in (0, len(self.contexts)):
            nearest: Floats = self._dense[max(above - 1, 0)]
            return nearest
        low, high = self.contexts[above - 1 : above + 1]
        before, after = self._dense[above - 1 : above + 1]
        between: Floats = before + (after - before) * (math.log(context / low) / math.log(high / low))
        return between

    def _check(self, name: str, matrix: Matrix) -> None:
        if len(matrix) != len(self.contexts) or any(len(line) != len(self.rows) for line in matrix):
            raise ConfigError(
                f"{name} of a co-run has lines of {[len(line) for line in matrix]} numbers; "
                f"it must have {len(self.contexts)} of {len(self.rows)}"
            )
        for value in (each for line in matrix for each in line):
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} of a co-run is {value}; it must be a number above 0")

    def _by_row(self) -> Floats:
        """Return the factors of 0 … the largest row count by context: [contexts, 4, rows], as in factors."""
        verify, draft, verify_alone, draft_alone = (np.array(getattr(self, name)) for name in FACTORS)
        known, wanted = np.log2(self.rows), np.log2(np.maximum(np.arange(self.rows[-1] + 1), 1))
        matrices = np.stack([verify, draft, verify_alone / verify, draft_alone / draft], axis=1)
        return np.array([[np.interp(wanted, known, line) for line in lines] for lines in matrices])
