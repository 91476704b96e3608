"""What two lanes cost each other: how much longer things take beside one another than alone on everything.

Plain numbers, measured by the data plane and read by the control plane.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from faser.errors import ConfigError

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoRun:
    """Times in multiples of those alone on all processors, at least about 1.

    share: of the processors that the draft lane has, in (0, 1). verify, draft: while the other lane is busy.
    verify_alone, draft_alone: on the lane's own processors while the other lane is idle.
    Raises ConfigError for numbers that cannot be.
    """

    share: float
    verify: float
    draft: float
    verify_alone: float
    draft_alone: float

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ConfigError(f"a draft lane's share is {self.share}; it must lie between 0 and 1")
        for name in ("verify", "draft", "verify_alone", "draft_alone"):
            if not 0 < getattr(self, name) < np.inf:
                raise ConfigError(f"{name} of a co-run is {getattr(self, name)}; it must be a number above 0")

    def seconds(self, verify_s: Floats, draft_s: Floats) -> Floats:
        """From the start of both lanes until both are done; arguments: alone on everything, any shape.

        Both run slowed down by each other until one is done; the other does the rest without company.
        """
        beside_s = np.minimum(verify_s * self.verify, draft_s * self.draft)
        verify_left = 1 - beside_s / np.maximum(verify_s * self.verify, 1e-12)
        draft_left = 1 - beside_s / np.maximum(draft_s * self.draft, 1e-12)
        rest_s: Floats = np.maximum(
            verify_left * verify_s * self.verify_alone, draft_left * draft_s * self.draft_alone
        )
        return beside_s + rest_s

    def one(self, verify_s: float, draft_s: float) -> float:
        """The same for a single pair."""
        return float(self.seconds(np.array(verify_s), np.array(draft_s)))
