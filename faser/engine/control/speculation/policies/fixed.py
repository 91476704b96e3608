"""The policy `fixed`: everybody drafts the same number of tokens and all of them are verified."""

import numpy as np

from faser.engine.contract.plan import StopRule
from faser.engine.control.speculation.policies.policy import Candidates, Ints


class Fixed:
    """See Policy. gamma: tokens to draft, at least 1."""

    name = "fixed"

    def __init__(self, gamma: int) -> None:
        assert gamma >= 1, f"a draft of {gamma} tokens; off is a policy of its own"
        self._gamma = gamma

    def lengths(self, candidates: Candidates) -> Ints:
        return np.minimum(candidates.limit, self._gamma)

    def stop_rule(self, candidates: Candidates, lengths: Ints) -> StopRule | None:  # noqa: ARG002
        return None

    def keep(self, candidates: Candidates, lengths: Ints) -> Ints:  # noqa: ARG002
        return lengths
