"""The policy `off`: nobody drafts."""

import numpy as np

from faser.engine.contract.plan import StopRule
from faser.engine.control.speculation.policies.policy import Candidates, Ints


class Off:
    """See Policy."""

    name = "off"

    def lengths(self, candidates: Candidates) -> Ints:
        return np.zeros_like(candidates.limit)

    def stop_rule(self, candidates: Candidates, lengths: Ints) -> StopRule | None:  # noqa: ARG002
        return None

    def keep(self, candidates: Candidates, lengths: Ints) -> Ints:  # noqa: ARG002
        return lengths
