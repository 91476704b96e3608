"""The policy `off`: no sequence drafts."""

import numpy as np

from faser.engine.control.speculation.policies.policy import Candidates, Ints, Policy


class Off(Policy):
    name = "off"
    never_drafts = True

    def lengths(self, candidates: Candidates) -> Ints:
        return np.zeros_like(candidates.limit)
