"""The policy `table`: one draft length for all sequences, by how many the step has (vLLM's dynamic lengths)."""

from bisect import bisect_left

import numpy as np

from faser.engine.control.speculation.policies.policy import Candidates, Ints, Policy
from faser.errors import ConfigError


class Table(Policy):
    """entries: (first, last, gamma), ascending without gaps; beyond the last entry its gamma holds.

    Raises ConfigError for an empty table.
    """

    name = "table"

    def __init__(self, entries: tuple[tuple[int, int, int], ...]) -> None:
        if not entries:
            raise ConfigError("policy is table, but no table of draft lengths by number of sequences is given")
        self._lasts = [last for _, last, _ in entries]
        self._gammas = [gamma for _, _, gamma in entries]

    def lengths(self, candidates: Candidates) -> Ints:
        num_sequences = candidates.num_sequences + candidates.other_sequences
        at = min(bisect_left(self._lasts, num_sequences), len(self._gammas) - 1)
        return np.minimum(candidates.limit, self._gammas[at])
