"""What two lanes cost each other: how much longer things take beside one another than alone on everything.

Plain numbers, measured by the data plane and read by the control plane. They depend on the step: lanes that both
wait for memory share it, and one that computes leaves the memory to the other.
"""

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
    """Times in multiples of those alone on all processors, at least about 1, at every pair of rows and contexts.

    share: of the processors that the draft lane has, in (0, 1). rows: of the target's step; what is drafted beside
    it is for its sequences. contexts: tokens that each sequence has in the cache. Both ascend.
    verify, draft: while the other lane is busy. verify_alone, draft_alone: on the lane's own processors while the
    other lane is idle. Between neighbours the first two, and the others as parts of these, lie on lines over the
    logarithm of rows and of contexts; beyond the ends they stay what they are.
    Raises ConfigError for numbers that cannot be.
    """

    share: float
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    verify: Matrix
    draft: Matrix
    verify_alone: Matrix
    draft_alone: Matrix
    _dense: Floats = field(init=False, repr=False, compare=False)  # see _by_row

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
        """The same for all steps."""
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
        """[4, *rows.shape]: verify, draft, and what of either is left when the other lane becomes idle.

        rows: of the step. context: tokens, the mean over its sequences.
        """
        found: Floats = self._at(context).take(rows, axis=1, mode="clip")
        return found

    def seconds(self, verify_s: Floats, draft_s: Floats, rows: Ints, context: float) -> Floats:
        """From the start of both lanes until both are done. verify_s, draft_s: alone on everything.

        rows, context: as in factors; the three arrays in shapes that go together.
        Both run slowed down by each other until one is done; the other does the rest without company.
        """
        verify, draft, verify_eased, draft_eased = self.factors(rows, context)
        verify_s, draft_s = verify_s * verify, draft_s * draft
        longer_s = verify_s - draft_s
        rest_s: Floats = np.maximum(longer_s * verify_eased, longer_s * -draft_eased)
        return np.minimum(verify_s, draft_s) + rest_s

    def one(self, verify_s: float, draft_s: float, *, rows: int, context: float) -> float:
        """The same for a single pair."""
        return float(self.seconds(np.array(verify_s), np.array(draft_s), np.array(rows), context))

    def _at(self, context: float) -> Floats:
        """[4, 0 … last of rows] as in factors."""
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
        """[contexts, 4, 0 … last of rows] as in factors."""
        verify, draft, verify_alone, draft_alone = (np.array(getattr(self, name)) for name in FACTORS)
        known, wanted = np.log2(self.rows), np.log2(np.maximum(np.arange(self.rows[-1] + 1), 1))
        matrices = np.stack([verify, draft, verify_alone / verify, draft_alone / draft], axis=1)
        return np.array([[np.interp(wanted, known, line) for line in lines] for lines in matrices])
