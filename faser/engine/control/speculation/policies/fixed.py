"""The policy `fixed`: every sequence drafts the same number of tokens, and all of them are verified."""

import numpy as np

from faser.engine.control.speculation.policies.policy import Candidates, Ints, Policy


class Fixed(Policy):
    """gamma: tokens of a draft, at least 1."""

    name = "fixed"

    def __init__(self, gamma: int) -> None:
        assert gamma >= 1, f"a draft of {gamma} tokens; off is a policy of its own"
        self._gamma = gamma

    def lengths(self, candidates: Candidates) -> Ints:
        return np.minimum(candidates.limit, self._gamma)
