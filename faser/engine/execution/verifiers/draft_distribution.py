"""The distributions that draft tokens were drawn from: those that came with them, or point masses.

Point masses are written out only for the rows that are asked for, never for a whole step.
"""

import torch
from torch import Tensor

from faser.engine.execution.verifiers.judged_rows import JudgedRows


class DraftDistribution:
    """By row of the step, the distribution of its draft token. A row that judges no token has zeros.

    probs: [T, V] float64, of the draft tokens; None: each is a point mass. like: a tensor [R, V] on the device of
    the results.
    """

    def __init__(self, rows: JudgedRows, probs: Tensor | None, like: Tensor) -> None:
        self._drafted = torch.from_numpy(rows.drafted).to(like.device)
        self._judging = torch.from_numpy(rows.judging).to(like.device)
        self._probs = probs
        self._line = torch.full_like(self._drafted, -1)  # of probs, by row
        self._line[self._judging] = torch.arange(len(self._judging), device=like.device)
        self._width = like.shape[-1]

    def of_drafted(self) -> Tensor:
        """[R] float64, probability of each row's draft token; 0 where there is none."""
        found = torch.zeros(len(self._drafted), dtype=torch.float64, device=self._drafted.device)
        found[self._judging] = 1.0
        if self._probs is not None:
            found[self._judging] = self._probs.gather(-1, self._drafted[self._judging, None])[:, 0]
        return found

    def of_rows(self, rows: Tensor) -> Tensor:
        """[len(rows), V] float64; zeros for a row that judges no token."""
        found = torch.zeros(len(rows), self._width, dtype=torch.float64, device=rows.device)
        line = self._line[rows]
        judging = (line >= 0).nonzero()[:, 0]
        if self._probs is None:
            found[judging, self._drafted[rows[judging]]] = 1.0
        else:
            found[judging] = self._probs[line[judging]]
        return found
